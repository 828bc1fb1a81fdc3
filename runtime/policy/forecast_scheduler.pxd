import cython

from runtime.policy.queue cimport prefetch_key


cdef class ForecastScheduler:
    cdef public object cache
    cdef object _top_k, _lookahead_layers
    cdef bint _is_named, _is_bounded
    cdef Py_ssize_t _order, _num_layers

    @cython.locals(timely=list, ranked=list, first=Py_ssize_t, layer=Py_ssize_t,
                   first_layer=Py_ssize_t, end_layer=Py_ssize_t)
    cpdef schedule(self, forecasts, Py_ssize_t layer_now)
    @cython.locals(layers=list, chosen=list, ranked=list, num_left=Py_ssize_t,
                   num_queued=Py_ssize_t, num_experts=Py_ssize_t, place=Py_ssize_t,
                   row=Py_ssize_t, e=Py_ssize_t)
    cpdef _prefetch_first(self, list forecasts)
    @cython.locals(order=Py_ssize_t, num_layers=Py_ssize_t, row=Py_ssize_t, e=Py_ssize_t)
    cpdef _write_keys(self, double[:, ::1] order_LE, long long[::1] ahead_L, double[:, ::1] key_LE)
