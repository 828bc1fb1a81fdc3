import cython


cpdef double prefetch_key(
    Py_ssize_t order, double probability, Py_ssize_t ahead, Py_ssize_t num_layers
) except? -1


cdef class TransferQueue:
    cdef bint _goes_by_distance
    cdef Py_ssize_t _order, _num_layers, _layer_now
    cdef dict _high, _low
    cdef readonly object requested, predicted
    cdef list _ordered
    cdef bint _is_outdated
    cdef long long _num_pushed

    cpdef advance(self, Py_ssize_t layer_now)
    cpdef push_high(self, tuple expert)
    @cython.locals(queued=tuple)
    cpdef push_low(self, tuple expert, probability)
    cpdef remove(self, tuple expert)
    cpdef clear(self)
    @cython.locals(expert=tuple)
    cpdef list remove_low_of_layer(self, Py_ssize_t layer, keep=*)
    cpdef bint is_low(self, tuple expert)
    cpdef probability(self, tuple expert)
    cpdef list low(self)
    @cython.locals(layers_ahead=Py_ssize_t)
    cpdef tuple _place(self, tuple expert)
