import cython

from runtime.policy.eviction.base cimport EvictionPolicy


cdef class LayerGhost:
    cdef public Py_ssize_t num_slots
    cdef Py_ssize_t _num_experts, _num_arms
    cdef object _resident_EA, _no_hits_A, _hits_A
    cdef unsigned char[:, ::1] _is_resident_EA
    cdef long long[::1] _num_hits_A
    cdef double[::1] _tie_E, _key_E, _lowest_E

    cpdef serve(self, list chosen_K, score_EA)
    @cython.locals(a=Py_ssize_t, e=Py_ssize_t, num_hits=Py_ssize_t, num_absent=Py_ssize_t,
                   num_dropped=Py_ssize_t, least=double, missed=bint)
    cpdef _serve(self, list chosen_K, const double[:, :] score_EA)
    @cython.locals(e=Py_ssize_t, i=Py_ssize_t, num_kept=Py_ssize_t, key=double)
    cpdef double _find_least(self, Py_ssize_t rank) except? -1


cdef class UseShares:
    cdef public dict ghosts
    cdef public Py_ssize_t arm
    cdef Py_ssize_t _num_experts, _forever
    cdef object _hits_A, _decay_A, _score_LEA, _weight_A, _total_A
    cdef double[:, :, ::1] _view_LEA
    cdef double _step
    cdef double[:, ::1] _last_step_LE
    cdef double[::1] _most_A, _blended_weight
    cdef long long[::1] _blended_arm

    cpdef begin_step(self)
    @cython.locals(e=Py_ssize_t, a=Py_ssize_t, share=double, most=double, num_tokens=double,
                   weight_A="const double[::1]")
    cpdef on_routed(self, Py_ssize_t layer, tokens_per_expert)
    @cython.locals(arm=Py_ssize_t, view_EA="double[:, ::1]")
    cpdef of_all_arms(self, Py_ssize_t layer)
    cpdef write_layer(self, Py_ssize_t layer, double[:] share_E)
    cpdef write_arm(self, Py_ssize_t layer, Py_ssize_t arm, double[:] share_E)
    @cython.locals(e=Py_ssize_t, a=Py_ssize_t, i=Py_ssize_t, num_blended=Py_ssize_t,
                   blend=double, age=double)
    cpdef _write_each(self, Py_ssize_t layer, Py_ssize_t arm, double[:] share_E)
    cpdef write_decayed(self, Py_ssize_t layer, double decay, double[:] share_E)
    @cython.locals(e=Py_ssize_t, most=double)
    cpdef _write_decayed(self, Py_ssize_t layer, Py_ssize_t a, double[:] share_E)


cdef class RegretEviction(EvictionPolicy):
    cdef Py_ssize_t _layer_now
    cdef UseShares _counts
    cdef double[:, ::1] _value_LE, _view_LE, _distance_LL
    cdef bint _is_outdated

    cpdef begin_step(self, requests_T)
    cpdef on_routed(self, Py_ssize_t layer, tokens_per_expert)
    cpdef _follow_routing(self, Py_ssize_t layer, tokens_per_expert)
    cpdef _set_value(self, Py_ssize_t layer, tokens_per_expert)
    @cython.locals(layer=Py_ssize_t, e=Py_ssize_t, distance=double, share=double, least=double)
    cpdef scores(self)
    cpdef end_step(self)
