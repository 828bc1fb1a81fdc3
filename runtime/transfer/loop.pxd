import cython

from runtime.policy.tier cimport CacheTier, TransferTask
from runtime.transfer.ring cimport Ring


cdef class TierLink:
    cdef public object name
    cdef public CacheTier tier
    cdef public Ring ring
    cdef public double busy_seconds, bytes_per_second
    cdef public long long moved_bytes, prefetched_bytes
    cdef public dict prefetches
    cdef list _track_ends

    @cython.locals(is_idle_soon=bint)
    cpdef bint takes_prefetch(self, double ahead_seconds) except -1


cdef class TransferLoop:
    cdef public tuple links
    cdef public object timeline
    cdef public double stall_seconds
    cdef public dict _running
    cdef public set _ahead
    cdef Py_ssize_t _num_submitted
    cdef bint _has_news
    cdef double _last_event, _longest_pause

    @cython.locals(link=TierLink, now=double)
    cpdef pump(self, bint is_idle=*)
    cpdef book(self)
    @cython.locals(tier=CacheTier, ring=Ring, task=TransferTask, ahead=double)
    cpdef _fill(self, TierLink link, bint is_idle)
    cpdef _submit(self, TierLink link, TransferTask task)
    @cython.locals(link=TierLink, task=TransferTask)
    cpdef bint _take_back(self, ticket) except -1
    @cython.locals(link=TierLink, task=TransferTask, running=tuple)
    cpdef _finish(self, ticket, status, double seconds, double end)
    cpdef _forget(self, ticket, TierLink link, TransferTask task)
    cpdef _forget_prefetch(self, ticket, TierLink link, TransferTask task)
    @cython.locals(speed=double, before=double)
    cpdef _complete(self, ticket, TierLink link, TransferTask task, double seconds, double end)
    cpdef _arrive(self, TierLink link, TransferTask task)
    @cython.locals(is_waiting=bint, started=double)
    cpdef wait_for(self, cache, layer, candidates)
    cpdef bint _join(self, layer, candidates) except -1
    cpdef _check(self, layer, candidates)
    @cython.locals(end=double)
    cpdef _record_stall(self, layer, double started)
    cpdef wait(self)
    cpdef double _read_clock(self) except? -1
