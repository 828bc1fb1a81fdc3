import cython


cdef class CacheEntry:
    cdef public Py_ssize_t slot, ready_chunks, pins
    cdef public long long speculative_bytes
    cdef public bint in_flight


cdef class _Partition:
    cdef public object slots
    cdef public list free


cdef class ExpertCache:
    cdef public Py_ssize_t num_slots, num_changes
    cdef public bint per_layer
    cdef public object policy
    cdef public dict entries
    cdef public list first_slots
    cdef list _partitions, _partition_of_layer, _own_slots, _sizes, _starts
    cdef Py_ssize_t _num_shared, _num_free
    cdef public set _quarantine

    cpdef expect_changes(self)
    cpdef Py_ssize_t share(self, Py_ssize_t layer)
    @cython.locals(
        partition=_Partition, entry=CacheEntry, freed=CacheEntry, slot=Py_ssize_t
    )
    cpdef admit(self, tuple expert, bint prefetch=*, keep=*, dict victims=*)
    @cython.locals(free=dict, layer=Py_ssize_t, e=Py_ssize_t, slot=Py_ssize_t)
    cpdef Py_ssize_t _take_free(self, _Partition partition, tuple expert)
    @cython.locals(entry=CacheEntry)
    cpdef bint _is_evictable(self, tuple expert)
    @cython.locals(entry=CacheEntry)
    cpdef CacheEntry remove(self, tuple expert)
    @cython.locals(entry=CacheEntry)
    cpdef CacheEntry _detach(self, tuple expert)
    cpdef _add_free(self, _Partition partition, Py_ssize_t slot)
    @cython.locals(num_taken=Py_ssize_t)
    cpdef _check(self)
