import cython

from runtime.policy.eviction.regret cimport LayerGhost, RegretEviction
from runtime.policy.eviction.base cimport copy_scores


cdef class ReuseEviction(RegretEviction):
    cdef dict _ghosts, _probabilities
    cdef set _forecast_layers, _expected
    cdef list _is_predicted
    cdef double _hits, _slow_weight
    cdef double[:, ::1] _predicted_view_LE, _idle_view_LE, _expected_LE
    cdef object _predicted_LE, _routed
    cdef readonly object idle_score_LE
    cdef bint _is_long, _uses_predictions
    cdef public bint trusts_predictor

    cpdef begin_step(self, requests_T)
    cpdef on_forecast(self, Py_ssize_t layer, probability_E, order_E)
    cpdef on_reuse_scores(self, Py_ssize_t layer, score_HE)
    @cython.locals(first=bint)
    cpdef on_routed(self, Py_ssize_t layer, tokens_per_expert)
    @cython.locals(ghost=LayerGhost)
    cpdef _set_value(self, Py_ssize_t layer, tokens_per_expert)
    @cython.locals(e=Py_ssize_t, weight=double, view_E="double[::1]")
    cpdef _mix_predictions(self, Py_ssize_t layer)
    cpdef _expect(self, Py_ssize_t layer)
    @cython.locals(e=Py_ssize_t, probability=double, value=double)
    cpdef _expect_each(self, Py_ssize_t layer, const float[:] probability_E)
    @cython.locals(layer=Py_ssize_t, e=Py_ssize_t)
    cpdef scores(self)
    @cython.locals(layer=Py_ssize_t)
    cpdef compute_idle_scores(self)
    cpdef bint may_evict_for(self, tuple victim, tuple newcomer) except -1
    @cython.locals(layer=Py_ssize_t, e=Py_ssize_t)
    cpdef double score(self, tuple expert) except? -2
    cpdef next_idle_candidate(self)
    cpdef end_step(self)
