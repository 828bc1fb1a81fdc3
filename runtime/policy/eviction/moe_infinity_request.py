"""Eviction by request-level EAM counts, with protection of prefetched experts.

Shape suffixes: L layers, E experts, N = experts of the partition's layers.
"""

from collections.abc import Collection, Mapping

import numpy as np

from runtime.policy.eviction.frequency import EPSILON, layer_decay
from runtime.policy.eviction.protocol import EvictionOrder, EvictionPolicy, Expert, Probabilities
from runtime.policy.eviction.score_order import PROTECTED, ScoreOrder, view_scores


class ProtectingOrder(ScoreOrder):
    """Lowest score first; experts that were prefetched and still await their router come last."""

    def __init__(self, policy: "MoeInfinityRequestEviction", *, num_slots: int, layers: range):
        scores = view_scores(policy.score_LE, layers)
        super().__init__(scores, layers=layers, num_experts=policy.score_LE.shape[1])
        self._policy = policy
        self._num_slots = num_slots
        self._layers = layers
        self._awaiting: dict[int, set[int]] = {layer: set() for layer in layers}

    def on_admit(self, expert: Expert) -> None:
        super().on_admit(expert)
        if not self._policy.is_requested(expert):
            self._awaiting[expert[0]].add(expert[1])
            self._policy.score_LE[expert] = PROTECTED

    def on_use(self, expert: Expert) -> None:
        super().on_use(expert)
        self._unprotect(expert)

    def on_remove(self, expert: Expert) -> None:
        super().on_remove(expert)
        self._unprotect(expert)

    def unprotect_others(self, layer: int, chosen: Collection[int]) -> None:
        """Ends the protection of the layer's experts that were not chosen (scenario (ii))."""
        for e in self._awaiting[layer].difference(chosen):
            self._unprotect((layer, e))

    def unprotect_outranked(self) -> None:
        """Ends the protection of experts that newer forecasts rank below the first K.

        Scenario (iii); K is the number of slots.
        """
        awaiting = [(layer, e) for layer, experts in self._awaiting.items() for e in experts]
        if not awaiting:
            return
        priority_N = self._policy.priority_LE[self._layers.start : self._layers.stop].reshape(-1)
        if self._num_slots >= len(priority_N):
            return
        least = np.partition(priority_N, -self._num_slots)[-self._num_slots]
        for expert in awaiting:
            if self._policy.priority_LE[expert] < least:
                self._unprotect(expert)

    def _unprotect(self, expert: Expert) -> None:
        awaiting = self._awaiting[expert[0]]
        if expert[1] in awaiting:
            awaiting.remove(expert[1])
            self._policy.reset_score(expert)


class MoeInfinityRequestEviction(EvictionPolicy):
    """Evicts the lowest count in the request-level EAM (MoE-Infinity, request level, section 5.2).

    Iterations, the prefill among them, are added to the EAM when they end; it is empty when a
    request starts. The first layers are favoured by the sequence-level paper's decay,
    `(count + epsilon) * (1 - l / L)`: this paper asks for it and gives no formula. A prefetched
    expert has the highest score until (i) its router requests it (its pin keeps it until it has
    been computed), (ii) its layer is routed without it, or (iii) newer forecasts, weighted with
    `1 - (i - l) / L`, leave it out of the first K. Ties go to the least recently touched expert.
    """

    def __init__(self, *, num_layers: int, num_experts: int):
        shape = num_layers, num_experts
        self._iteration_LE = np.zeros(shape)
        self._request_LE = np.zeros(shape)
        self._decay_L = layer_decay(num_layers)
        self.score_LE = np.zeros(shape)
        self.priority_LE = np.zeros(shape)
        """Prefetching priority of experts of later layers (section 5.1), of this iteration."""
        self._layer_now = -1
        self._chosen: Mapping[int, int] = {}
        self._order_of_layer: dict[int, ProtectingOrder] = {}
        self._update_scores()

    def make_order(self, *, num_slots: int, layers: range) -> EvictionOrder:
        order = ProtectingOrder(self, num_slots=num_slots, layers=layers)
        self._order_of_layer.update(dict.fromkeys(layers, order))
        return order

    def is_requested(self, expert: Expert) -> bool:
        return expert[0] == self._layer_now and expert[1] in self._chosen

    def reset_score(self, expert: Expert) -> None:
        """Sets the score to that of the request-level EAM."""
        count = float(self._request_LE[expert])
        self.score_LE[expert] = (count + EPSILON) * self._decay_L[expert[0]]

    def _update_scores(self) -> None:
        protected_LE = self.score_LE == PROTECTED
        self.score_LE[:] = (self._request_LE + EPSILON) * self._decay_L[:, None]
        self.score_LE[protected_LE] = PROTECTED

    def begin_step(self, new_request: bool) -> None:
        self._iteration_LE[:] = 0.0
        self.priority_LE[:] = 0.0
        if new_request:
            self._request_LE[:] = 0.0
            self._update_scores()

    def on_routed(self, layer: int, tokens_per_expert: Mapping[int, int]) -> None:
        # The previous layer's choices have been computed, even if the tier above had them.
        self._unprotect_others(self._layer_now, ())
        self._layer_now = layer
        self._chosen = tokens_per_expert
        self._iteration_LE[layer, list(tokens_per_expert)] += list(tokens_per_expert.values())
        self.priority_LE[layer] = 0.0
        self._unprotect_others(layer, tokens_per_expert)

    def _unprotect_others(self, layer: int, chosen: Collection[int]) -> None:
        if layer in self._order_of_layer:
            self._order_of_layer[layer].unprotect_others(layer, chosen)

    def on_forecast(self, layer: int, probability_E: Probabilities) -> None:
        proximity = 1.0 - (layer - max(0, self._layer_now)) / len(self._decay_L)
        self.priority_LE[layer] = np.asarray(probability_E) * proximity
        self._order_of_layer[layer].unprotect_outranked()

    def end_step(self) -> None:
        self._unprotect_others(self._layer_now, ())
        self._layer_now = -1
        self._chosen = {}
        self._request_LE += self._iteration_LE
        self._update_scores()
