import cython


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
