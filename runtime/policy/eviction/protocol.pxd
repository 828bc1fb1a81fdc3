cdef class EvictionPolicy:
    cpdef begin_step(self, requests_T)
    cpdef on_tokens_routed(self, Py_ssize_t layer, experts_TK)
    cpdef on_routed(self, Py_ssize_t layer, tokens_per_expert)
    cpdef on_forecast(self, Py_ssize_t layer, probability_E, order_E)
    cpdef on_reuse_scores(self, Py_ssize_t layer, score_HE)
    cpdef end_step(self)
    cpdef bint may_evict_for(self, tuple victim, tuple newcomer) except -1
    cpdef next_idle_candidate(self)
    cpdef bint is_permanent(self, tuple expert) except -1
