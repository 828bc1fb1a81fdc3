"""Eviction by request-level EAM counts, with protection of prefetched experts.

Shape suffixes: T tokens of the step, K top_k, R requests of the step, L layers, E experts,
N = experts of the partition's layers.
"""

from collections.abc import Mapping

import numpy as np

from predictors.base import Ints
from runtime.policy.eviction.live_eams import EPSILON, LiveEams, layer_decay
from runtime.policy.eviction.protecting import ProtectingEviction, ProtectingOrder
from runtime.policy.eviction.protocol import Probabilities
from runtime.policy.eviction.score_order import view_scores


class TopKOrder(ProtectingOrder):
    """Protects only prefetched experts that forecasts rank among the first K, the slots."""

    def __init__(self, policy: "MoeInfinityRequestEviction", *, num_slots: int, layers: range):
        scores, num_experts = view_scores(policy.score_LE, layers), policy.score_LE.shape[1]
        super().__init__(scores, layers=layers, num_experts=num_experts)
        self._policy = policy
        self._priorities = view_scores(policy.priority_LE, layers)
        self._num_slots = num_slots

    def unprotect_outranked(self) -> None:
        """Ends the protection of experts that newer forecasts rank below the first K.

        Scenario (iii); K is the number of slots.
        """
        awaiting, priority_N = self.awaiting, self._priorities()
        if not awaiting or self._num_slots >= len(priority_N):
            return
        priority_LE = self._policy.priority_LE
        lowest = min([priority_LE[expert] for expert in awaiting])
        # Counting is much cheaper than finding the K-th, and mostly none is outranked.
        if np.count_nonzero(priority_N > lowest) < self._num_slots:
            return
        least = np.partition(priority_N, -self._num_slots)[-self._num_slots]
        for expert in awaiting:
            if priority_LE[expert] < least:
                self.unprotect(expert)


class MoeInfinityRequestEviction(ProtectingEviction):
    """Evicts the lowest count in the request-level EAM (MoE-Infinity, request level, section 5.2).

    Iterations, the prefill among them, are added to the EAM when they end; it is empty when a
    request starts. Each request has its own; with several in a step, their counts are added. The
    first layers are favoured by the sequence-level paper's decay,
    `(count + epsilon) * (1 - l / L)`: this paper asks for it and gives no formula. A prefetched
    expert has the highest score until (i) its router requests it, (ii) its layer is routed without
    it, or (iii) newer forecasts, weighted with `1 - (i - l) / L`, leave it out of the first K. Ties
    go to the least recently touched expert.
    """

    def __init__(self, *, num_layers: int, num_experts: int):
        super().__init__(num_layers=num_layers, num_experts=num_experts)
        self._eams = LiveEams(num_layers=num_layers, num_experts=num_experts)
        self._iteration_RLE = np.zeros((1, num_layers, num_experts))
        self._decay_L = layer_decay(num_layers)
        self.priority_LE = np.zeros((num_layers, num_experts))
        """Prefetching priority of experts of later layers (section 5.1), of this iteration."""

    def _make_protecting_order(self, num_slots: int, layers: range) -> TopKOrder:
        return TopKOrder(self, num_slots=num_slots, layers=layers)

    def begin_step(self, requests_T: Ints) -> None:
        self._eams.begin_step(requests_T)
        count_LE = self._eams.counts_RLE.sum(axis=0)
        self.score_LE[:] = (count_LE + EPSILON) * self._decay_L[:, None]
        self._iteration_RLE = np.zeros((self._eams.present.num_requests, *self.score_LE.shape))
        self.priority_LE[:] = 0.0

    def on_tokens_routed(self, layer: int, experts_TK: Ints) -> None:
        self._iteration_RLE[:, layer] += self._eams.count(experts_TK)

    def on_routed(self, layer: int, tokens_per_expert: Mapping[int, int]) -> None:
        super().on_routed(layer, tokens_per_expert)
        self.priority_LE[layer] = 0.0

    def on_forecast(self, layer: int, probability_E: Probabilities) -> None:
        proximity = 1.0 - (layer - max(0, self.layer_now)) / len(self._decay_L)
        self.priority_LE[layer] = np.asarray(probability_E, np.float64) * proximity
        order = self._order_of_layer[layer]
        assert isinstance(order, TopKOrder)
        order.unprotect_outranked()

    def end_step(self) -> None:
        super().end_step()
        self._eams.counts_SLE[self._eams.present.slots_R] += self._iteration_RLE
        self._eams.end_step()
