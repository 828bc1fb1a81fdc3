import cython


cdef class DistanceDiscount:
    cdef Py_ssize_t _num_layers, _num_experts
    cdef readonly object score_LE
    cdef object _slowed_LE
    cdef double[:, ::1] _view_LE, _share_LE, _distance_LL

    @cython.locals(e=Py_ssize_t, least=double)
    cpdef set_shares(self, Py_ssize_t layer, const double[:] share_E)
    @cython.locals(layer=Py_ssize_t, e=Py_ssize_t, distance=double, share=double)
    cpdef compute(self, Py_ssize_t layer_now)
