import cython

from runtime.policy.cache cimport CacheEntry
from runtime.policy.counters cimport CacheCounters
from runtime.policy.tier cimport CacheTier


cdef class DeviceCache:
    cdef public tuple tiers
    cdef tuple _tops, _lower
    cdef public CacheTier top
    cdef CacheTier _only
    cdef public object system
    cdef bint _early_preemption, _reordered, _cancel_outdated, _drop_used
    cdef object _placement
    cdef dict _top_of_device
    cdef Py_ssize_t _num_experts, _num_owned
    cdef dict _predicted
    cdef public Py_ssize_t layer_now
    cdef public dict _early, _pinned_early
    cdef public set _displaced

    cpdef bint owns(self, tuple expert)
    cpdef _own(self, Py_ssize_t layer, experts)
    cpdef CacheTier computing_tier(self, tuple expert)
    cpdef _on_device(self, CacheTier tier, Py_ssize_t layer, experts)
    @cython.locals(top=CacheTier)
    cpdef bint is_ready(self, tuple expert)
    @cython.locals(expert=tuple, top=CacheTier)
    cpdef first_ready(self, Py_ssize_t layer, experts)
    @cython.locals(tier=CacheTier)
    cpdef _advance(self, Py_ssize_t layer_now)
    @cython.locals(top=CacheTier, num_ready=Py_ssize_t)
    cpdef tuple _changing_tiers(self)
    @cython.locals(tier=CacheTier)
    cpdef begin_step(self, requests_T)
    @cython.locals(tier=CacheTier)
    cpdef end_step(self)
    @cython.locals(tier=CacheTier)
    cpdef on_tokens_routed(self, Py_ssize_t layer, experts_TK)
    @cython.locals(tier=CacheTier)
    cpdef on_forecast(self, Py_ssize_t layer, probability_E, order_E)
    @cython.locals(tier=CacheTier)
    cpdef on_reuse_scores(self, Py_ssize_t layer, score_HE)
    @cython.locals(predicted=dict, top=CacheTier, entry=CacheEntry, expert=tuple,
                   is_known=bint, share=Py_ssize_t)
    cpdef prefetch(self, Py_ssize_t layer, experts, probabilities, named=*)
    @cython.locals(tier=CacheTier, top=CacheTier, num_missing=Py_ssize_t, all_ready=bint,
                   expert=tuple)
    cpdef list request_routed(self, Py_ssize_t layer, tokens_per_expert, computed_below=*)
    cpdef next_candidates(self, Py_ssize_t layer, list pending)
    @cython.locals(top=CacheTier)
    cpdef request(self, tuple expert)
    @cython.locals(top=CacheTier)
    cpdef make_room(self, Py_ssize_t layer, expert, list coming)
    @cython.locals(top=CacheTier)
    cpdef release(self, tuple expert)
    @cython.locals(top=CacheTier, expert=tuple)
    cpdef cancel(self, Py_ssize_t layer, experts)
    @cython.locals(num_missing=Py_ssize_t, top=CacheTier, counters=CacheCounters)
    cpdef Py_ssize_t count_routed(self, Py_ssize_t layer, experts, early=*) except -1
    @cython.locals(top=CacheTier, entry=CacheEntry, expert=tuple, is_hit=bint,
                   counters=CacheCounters)
    cpdef bint _count_request(self, Py_ssize_t layer, e, named) except -1
