import cython


cdef class DecayedCounts:
    cdef Py_ssize_t _num_experts, _num_arms
    cdef public object decay_A, score_LEA
    cdef object _weight_A, _total_A
    cdef double[:, :, ::1] view_LEA
    cdef double[::1] most_A

    cpdef begin_step(self)
    cpdef on_routed(self, Py_ssize_t layer, tokens_per_expert)
    @cython.locals(k=Py_ssize_t, e=Py_ssize_t, a=Py_ssize_t, share=double)
    cpdef _add_uses(self, Py_ssize_t layer, list chosen, list tokens_K, double most,
                    const double[::1] weight_A)
    cpdef shares_of_arm(self, Py_ssize_t layer, Py_ssize_t arm)
    @cython.locals(e=Py_ssize_t, most=double)
    cpdef write_shares(self, Py_ssize_t layer, Py_ssize_t arm, double[::1] share_E)
