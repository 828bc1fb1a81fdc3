import cython

from runtime.policy.eviction.decayed_lfu cimport DecayedCounts


cdef class UseShares:
    cdef public DecayedCounts _counts
    cdef public object ghosts
    cdef Py_ssize_t _num_experts, _forever
    cdef double _step
    cdef double[:, ::1] _last_step_LE
    cdef list _blended
    cdef long long[::1] _blended_arm
    cdef double[::1] _blended_weight

    cpdef begin_step(self)
    @cython.locals(e=Py_ssize_t)
    cpdef on_routed(self, Py_ssize_t layer, tokens_per_expert)
    cpdef of_all_arms(self, Py_ssize_t layer)
    @cython.locals(counts=DecayedCounts, e=Py_ssize_t, a=Py_ssize_t, i=Py_ssize_t,
                   num_blended=Py_ssize_t, blend=double, age=double, num_decays=Py_ssize_t)
    cpdef _write_shares(self, Py_ssize_t layer, double[:, ::1] share_EA)
    cpdef of_layer(self, Py_ssize_t layer)
    cpdef decayed(self, Py_ssize_t layer, double decay)
