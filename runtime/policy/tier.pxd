import cython

from runtime.policy.cache cimport CacheEntry, ExpertCache
from runtime.policy.counters cimport CacheCounters
from runtime.policy.queue cimport TransferQueue


cdef class TransferTask:
    cdef readonly tuple expert
    cdef readonly Py_ssize_t slot, first_chunk, end_chunk
    cdef readonly long long num_bytes
    cdef readonly bint high
    cdef readonly object source_slot


cdef class CacheTier:
    cdef public ExpertCache cache
    cdef readonly Py_ssize_t device
    cdef public TransferQueue queue
    cdef public list counters
    cdef public CacheTier below
    cdef CacheTier _above
    cdef list _bytes_before
    cdef tuple _num_chunks
    cdef dict _entries
    cdef bint _chunked, _whole_requests
    cdef long long _least_prefetch
    cdef public bint idle_prefetch
    cdef Py_ssize_t _idle_refused_at
    cdef object _to_fill
    cdef dict _waiting, _copies
    cdef set _requested_below
    cdef public Py_ssize_t num_ready
    cdef public set late

    cpdef Py_ssize_t num_chunks(self, tuple expert)
    @cython.locals(entry=CacheEntry)
    cpdef bint is_ready(self, tuple expert)
    @cython.locals(entry=CacheEntry)
    cpdef double progress(self, tuple expert) except? -2
    @cython.locals(entry=CacheEntry)
    cpdef bint is_requested(self, tuple expert)
    @cython.locals(entry=CacheEntry)
    cpdef request(self, tuple expert)
    @cython.locals(entry=CacheEntry)
    cpdef pin(self, tuple expert)
    @cython.locals(entry=CacheEntry, is_requested=bint, num_left=Py_ssize_t)
    cpdef release(self, tuple expert)
    cpdef _release_below(self, tuple expert)
    @cython.locals(entry=CacheEntry, num_chunks=Py_ssize_t, entries=dict, queue=TransferQueue,
                   expert=tuple, i=Py_ssize_t)
    cpdef prefetch_all(self, Py_ssize_t layer, experts, probabilities)
    @cython.locals(expert=tuple)
    cpdef cancel_prefetches(self, Py_ssize_t layer, keep=*)
    @cython.locals(entry=CacheEntry)
    cpdef evict(self, tuple expert)
    @cython.locals(entry=CacheEntry)
    cpdef _evict_incomplete(self, tuple expert)
    cpdef bint may_start(self)
    @cython.locals(expert=tuple, victims=dict)
    cpdef next_task(self, bint high_only=*)
    cpdef _start_idle(self)
    @cython.locals(entry=CacheEntry, first=Py_ssize_t, end=Py_ssize_t, num_bytes="long long")
    cpdef _start(self, tuple expert, bint high, dict victims=*)
    @cython.locals(entry=CacheEntry, bytes_before=list, end=Py_ssize_t)
    cpdef Py_ssize_t _end_of_transfer(self, tuple expert, Py_ssize_t first, bint high) except -1
    cpdef bint _is_awaited(self, tuple expert)
    cpdef bint _is_within_reach(self, tuple expert)
    @cython.locals(below=CacheTier)
    cpdef _prefetch_below(self, tuple expert)
    @cython.locals(below=CacheTier)
    cpdef _begin_copy_below(self, tuple expert, Py_ssize_t end_chunk, bint high)
    @cython.locals(entry=CacheEntry)
    cpdef bint holds(self, tuple expert, Py_ssize_t num_chunks)
    @cython.locals(entry=CacheEntry)
    cpdef begin_copy(self, tuple expert, Py_ssize_t end_chunk)
    @cython.locals(entry=CacheEntry)
    cpdef end_copy(self, tuple expert)
    @cython.locals(entry=CacheEntry)
    cpdef CacheEntry _take_out_of_flight(self, TransferTask task)
    @cython.locals(entry=CacheEntry, num_bytes="long long", layer=Py_ssize_t, expert=tuple,
                   counters=CacheCounters)
    cpdef complete(self, TransferTask task)
    @cython.locals(entry=CacheEntry, counters=CacheCounters)
    cpdef bint count_request(self, tuple expert)
    @cython.locals(counters=CacheCounters)
    cpdef _count_eviction(self, tuple expert, CacheEntry entry)
