import cython

from runtime.policy.eviction.protocol cimport EvictionPolicy
from runtime.policy.eviction.score_order cimport ScoreOrder


cdef class DecayedCounts:
    cdef Py_ssize_t _num_experts, _num_arms
    cdef public object decay_A, score_LEA
    cdef object _weight_A, _total_A
    cdef double[:, :, ::1] view_LEA
    cdef double[::1] most_A

    cpdef begin_step(self)
    @cython.locals(k=Py_ssize_t, e=Py_ssize_t, a=Py_ssize_t, share=double, most=double,
                   chosen=list, tokens_K=list, weight_A="const double[::1]")
    cpdef on_routed(self, Py_ssize_t layer, tokens_per_expert)
    @cython.locals(e=Py_ssize_t, most=double)
    cpdef write_shares(self, Py_ssize_t layer, Py_ssize_t arm, double[:] share_E)


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
    cdef public DecayedCounts _counts
    cdef public object ghosts
    cdef Py_ssize_t _num_experts, _forever
    cdef double _step
    cdef double[:, ::1] _last_step_LE
    cdef long long[::1] _blended_arm
    cdef double[::1] _blended_weight

    cpdef begin_step(self)
    @cython.locals(e=Py_ssize_t)
    cpdef on_routed(self, Py_ssize_t layer, tokens_per_expert)
    @cython.locals(arm=Py_ssize_t, view_EA="double[:, ::1]")
    cpdef of_all_arms(self, Py_ssize_t layer)
    cpdef write_layer(self, Py_ssize_t layer, double[:] share_E)
    cpdef write_arm(self, Py_ssize_t layer, Py_ssize_t arm, double[:] share_E)
    @cython.locals(counts=DecayedCounts, e=Py_ssize_t, a=Py_ssize_t, i=Py_ssize_t,
                   num_blended=Py_ssize_t, blend=double, age=double, share=double)
    cpdef _write_each(self, Py_ssize_t layer, Py_ssize_t arm, double[:] share_E)
    cpdef write_decayed(self, Py_ssize_t layer, double decay, double[:] share_E)


cdef class DistanceDiscount:
    cdef Py_ssize_t _num_layers, _num_experts
    cdef readonly object score_LE
    cdef object _slowed_LE
    cdef double[:, ::1] _view_LE, _share_LE, _distance_LL

    @cython.locals(e=Py_ssize_t, least=double)
    cpdef set_shares(self, Py_ssize_t layer, const double[:] share_E)
    @cython.locals(layer=Py_ssize_t, e=Py_ssize_t, distance=double, share=double)
    cpdef compute(self, Py_ssize_t layer_now)


cdef class RegretEviction(EvictionPolicy):
    cdef Py_ssize_t _num_layers, _num_experts, _layer_now
    cdef UseShares _counts
    cdef DistanceDiscount _discount
    cdef double[:, ::1] _value_LE
    cdef readonly object score_LE
    cdef bint _is_outdated

    cpdef begin_step(self, requests_T)
    cpdef on_routed(self, Py_ssize_t layer, tokens_per_expert)
    cpdef _follow_routing(self, Py_ssize_t layer, tokens_per_expert)
    cpdef _set_value(self, Py_ssize_t layer, tokens_per_expert)
    cpdef compute_scores(self)
    cpdef end_step(self)


cdef class DiscountedOrder(ScoreOrder):
    cdef RegretEviction _policy

    cpdef scores(self)
