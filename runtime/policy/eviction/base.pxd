import cython


cdef class EvictionPolicy:
    cdef public Py_ssize_t _num_layers, _num_experts
    cdef readonly object score_LE, score_N
    cdef readonly list partitions
    cdef list _partition_L, _start_P
    cdef Py_ssize_t _size
    cdef long long _clock
    cdef double[::1] _absent_N, _masked_N
    cdef long long[::1] _touched_N, _residents_N, _places_N, _num_residents_P

    cpdef begin_step(self, requests_T)
    cpdef on_tokens_routed(self, Py_ssize_t layer, experts_TK)
    cpdef on_routed(self, Py_ssize_t layer, tokens_per_expert)
    cpdef on_forecast(self, Py_ssize_t layer, probability_E, order_E)
    cpdef on_reuse_scores(self, Py_ssize_t layer, score_HE)
    cpdef end_step(self)
    cpdef bint may_evict_for(self, tuple victim, tuple newcomer) except -1
    cpdef next_idle_candidate(self)
    cpdef bint is_permanent(self, tuple expert) except -1
    cpdef scores(self)
    @cython.locals(index=Py_ssize_t)
    cdef Py_ssize_t _index(self, tuple expert) except -1
    @cython.locals(layer=Py_ssize_t, e=Py_ssize_t)
    cpdef touch(self, tuple expert)
    @cython.locals(index=Py_ssize_t, partition=Py_ssize_t, place=Py_ssize_t)
    cpdef on_admit(self, tuple expert)
    cpdef on_prefetch(self, tuple expert)
    cpdef on_use(self, tuple expert)
    cpdef on_predict(self, tuple expert)
    @cython.locals(index=Py_ssize_t, partition=Py_ssize_t, end=Py_ssize_t, last=Py_ssize_t,
                   place=Py_ssize_t)
    cpdef on_remove(self, tuple expert)
    cpdef clear(self)
    @cython.locals(index=Py_ssize_t, partition=Py_ssize_t, start=Py_ssize_t, stop=Py_ssize_t,
                   end=Py_ssize_t, expert=tuple)
    cpdef choose_victim(self, Py_ssize_t layer, is_evictable)
    cpdef find_best_absent(self, score_LE, double least)
    @cython.locals(index=Py_ssize_t, start=Py_ssize_t, stop=Py_ssize_t, i=Py_ssize_t,
                   highest=double)
    cdef tuple _highest_absent(self, const double[:] score_N, Py_ssize_t partition, double least)
    @cython.locals(start=Py_ssize_t, stop=Py_ssize_t, end=Py_ssize_t, place=Py_ssize_t)
    cdef Py_ssize_t _mask(self, const double[:] score_N, Py_ssize_t partition) except -1
    @cython.locals(best=Py_ssize_t, place=Py_ssize_t, least=double, score=double)
    cdef Py_ssize_t _take_lowest(self, Py_ssize_t start, Py_ssize_t end) except -2


cpdef copy_scores(const double[:] score_E, double[:] target_E)
