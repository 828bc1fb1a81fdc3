import cython


cdef class ForecastScheduler:
    cdef public object cache, adaptive_prefetch
    cdef object _top_k, _candidates, _order, _lookahead_layers
    cdef Py_ssize_t _num_layers

    @cython.locals(timely=list, layer=Py_ssize_t, next_layer=Py_ssize_t, first_layer=Py_ssize_t)
    cpdef schedule(self, forecasts, Py_ssize_t layer_now)
