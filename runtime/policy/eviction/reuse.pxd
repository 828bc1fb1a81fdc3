import cython

from runtime.policy.eviction.protocol cimport EvictionPolicy
from runtime.policy.eviction.regret cimport DistanceDiscount, LayerGhost, UseShares
from runtime.policy.eviction.score_order cimport ScoreOrder, copy_scores


cdef class ReuseEviction(EvictionPolicy):
    cdef Py_ssize_t _num_layers, _num_experts, _layer_now
    cdef public UseShares _counts
    cdef DistanceDiscount _discount
    cdef dict _ghosts, _probabilities
    cdef set _forecast_layers, _expected
    cdef list _is_predicted, _orders
    cdef double _hits, _slow_weight, _slots_per_layer
    cdef double[:, ::1] _predicted_LE, _value_LE, _view_LE, _idle_view_LE, _expected_LE
    cdef readonly object score_LE, idle_score_LE
    cdef bint _is_outdated, _is_long, _uses_predictions
    cdef public bint trusts_predictor

    cpdef begin_step(self, requests_T)
    cpdef on_forecast(self, Py_ssize_t layer, probability_E)
    cpdef on_reuse_scores(self, Py_ssize_t layer, score_HE)
    @cython.locals(e=Py_ssize_t)
    cpdef _set_predicted(self, Py_ssize_t layer, const float[:] score_E)
    @cython.locals(ghost=LayerGhost, first=bint)
    cpdef on_routed(self, Py_ssize_t layer, tokens_per_expert)
    cpdef _mix_predictions(self, Py_ssize_t layer)
    @cython.locals(e=Py_ssize_t, weight=double, predicted=double)
    cpdef _mix(self, Py_ssize_t layer, double[::1] slow_E)
    cpdef _expect(self, Py_ssize_t layer)
    @cython.locals(e=Py_ssize_t, probability=double, value=double)
    cpdef _expect_each(self, Py_ssize_t layer, const float[:] probability_E)
    @cython.locals(layer=Py_ssize_t, e=Py_ssize_t)
    cpdef compute_scores(self)
    @cython.locals(layer=Py_ssize_t, e=Py_ssize_t, is_forecast=bint, none=double)
    cpdef compute_idle_scores(self)
    cpdef bint may_evict_for(self, tuple victim, tuple newcomer) except -1
    @cython.locals(layer=Py_ssize_t, e=Py_ssize_t)
    cpdef double score(self, tuple expert) except? -2
    cpdef next_idle_candidate(self)
    cpdef end_step(self)


cdef class ReuseOrder(ScoreOrder):
    cdef ReuseEviction _policy
    cdef object _view_idle

    cpdef tuple best_absent(self)
