import cython


cdef class PrefetchOrder:
    cdef public Py_ssize_t kind
    cdef public bint by_distance

    cpdef double key(self, double probability, Py_ssize_t ahead, Py_ssize_t num_layers) except? -1


cdef class _QueuedPrefetch:
    cdef public object probability
    cdef public long long ticket
    cdef public double key


cdef class TransferQueue:
    cdef PrefetchOrder _order
    cdef bint _by_distance
    cdef Py_ssize_t _num_layers, _layer_now
    cdef dict _high, _low
    cdef readonly object requested, predicted
    cdef list _heap
    cdef bint _is_outdated
    cdef long long _num_pushed

    cpdef advance(self, Py_ssize_t layer_now)
    cpdef push_high(self, tuple expert)
    @cython.locals(queued=_QueuedPrefetch, key=double, is_new=bint)
    cpdef push_low(self, tuple expert, probability)
    @cython.locals(layers_ahead=Py_ssize_t)
    cpdef double _key(self, Py_ssize_t layer, probability) except? -1
    cpdef remove(self, tuple expert)
    cpdef clear(self)
    @cython.locals(expert=tuple)
    cpdef list remove_low_of_layer(self, Py_ssize_t layer, keep=*)
    cpdef bint is_high(self, tuple expert)
    cpdef bint is_low(self, tuple expert)
    @cython.locals(queued=_QueuedPrefetch)
    cpdef probability(self, tuple expert)
    cpdef list low(self)
    @cython.locals(queued=_QueuedPrefetch, key=double, ticket="long long", expert=tuple)
    cpdef first_low(self)
    @cython.locals(queued=_QueuedPrefetch, layers_ahead=Py_ssize_t, next_layer=Py_ssize_t,
                   num_layers=Py_ssize_t, heap=list, expert=tuple)
    cpdef _rebuild(self)
