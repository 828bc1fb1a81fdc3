import cython


cdef class ScoreOrder:
    cdef public object _scores
    cdef public Py_ssize_t _num_experts, _first_layer, _size
    cdef long long _clock
    cdef double[::1] _absent_N, _masked_N
    cdef long long[::1] _touched_N

    @cython.locals(index=Py_ssize_t)
    cpdef Py_ssize_t index(self, tuple expert) except -1
    cpdef touch(self, tuple expert)
    cpdef on_admit(self, tuple expert)
    cpdef on_prefetch(self, tuple expert)
    cpdef on_use(self, tuple expert)
    cpdef on_predict(self, tuple expert)
    cpdef on_remove(self, tuple expert)
    cpdef clear(self)
    @cython.locals(index=Py_ssize_t, expert=tuple)
    cpdef choose_victim(self, is_evictable)
    @cython.locals(index=Py_ssize_t, i=Py_ssize_t, highest=double)
    cpdef tuple highest_absent(self, const double[:] score_N, double least)
    cpdef tuple _expert(self, Py_ssize_t index)
    @cython.locals(i=Py_ssize_t, masked_N="double[::1]", absent_N="double[::1]")
    cpdef _mask(self, const double[:] score_N)
    @cython.locals(index=Py_ssize_t, i=Py_ssize_t, least=double, score=double,
                   masked_N="double[::1]")
    cpdef Py_ssize_t _take_lowest(self) except -2


@cython.locals(e=Py_ssize_t)
cpdef copy_scores(const double[:] score_E, double[:] target_E)
