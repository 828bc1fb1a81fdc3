"""Eviction that protects prefetched experts until their layer is routed.

Shape suffixes: L layers, E experts, N = experts of the partition's layers.
"""

from collections.abc import Callable, Collection, Mapping

import numpy as np

from runtime.policy.eviction.protocol import EvictionOrder, EvictionPolicy, Expert
from runtime.policy.eviction.score_order import PROTECTED, ScoreOrder, Scores, view_scores


class ProtectingOrder(ScoreOrder):
    """Lowest score first; prefetched experts that still await their router come last."""

    def __init__(self, scores: Callable[[], Scores], *, layers: range, num_experts: int):
        super().__init__(self._protected_scores, layers=layers, num_experts=num_experts)
        self._own_scores = scores
        self._bonus_N = np.zeros(len(layers) * num_experts)
        self._awaiting: dict[int, set[int]] = {layer: set() for layer in layers}

    def _protected_scores(self) -> Scores:
        return self._own_scores() + self._bonus_N

    @property
    def awaiting(self) -> Collection[Expert]:
        """The protected experts."""
        return [(layer, e) for layer, experts in self._awaiting.items() for e in experts]

    def on_prefetch(self, expert: Expert) -> None:
        self._awaiting[expert[0]].add(expert[1])
        self._bonus_N[self.index(expert)] = PROTECTED

    def on_use(self, expert: Expert) -> None:
        super().on_use(expert)
        self.unprotect(expert)

    def on_remove(self, expert: Expert) -> None:
        super().on_remove(expert)
        self.unprotect(expert)

    def clear(self) -> None:
        super().clear()
        for expert in self.awaiting:
            self.unprotect(expert)

    def is_protected(self, expert: Expert) -> bool:
        return expert[1] in self._awaiting[expert[0]]

    def unprotect(self, expert: Expert) -> None:
        self._awaiting[expert[0]].discard(expert[1])
        self._bonus_N[self.index(expert)] = 0.0

    def unprotect_others(self, layer: int, chosen: Collection[int]) -> None:
        """Ends the protection of the layer's experts that were not chosen."""
        for e in self._awaiting[layer].difference(chosen):
            self.unprotect((layer, e))


class ProtectingEviction(EvictionPolicy):
    """Evicts the lowest score; a prefetched expert ranks above all others until it is used.

    MoE-Infinity (sequence level), section 6.2: "we need to give priority to prefetched experts over
    those already cached"; (request level), section 5.2: "we need to protect being prefetched
    experts from eviction". The protection ends when the router of the expert's layer requests it
    (its pin keeps it until it has been computed) or chooses others.
    """

    def __init__(self, *, num_layers: int, num_experts: int):
        self.score_LE = np.zeros((num_layers, num_experts))
        self.layer_now = -1
        """The last layer whose router has run in this step."""
        self._order_of_layer: dict[int, ProtectingOrder] = {}

    def make_order(self, *, num_slots: int, layers: range) -> EvictionOrder:
        order = self._make_protecting_order(num_slots, layers)
        self._order_of_layer.update(dict.fromkeys(layers, order))
        return order

    def _make_protecting_order(self, num_slots: int, layers: range) -> ProtectingOrder:  # noqa: ARG002
        scores, num_experts = view_scores(self.score_LE, layers), self.score_LE.shape[1]
        return ProtectingOrder(scores, layers=layers, num_experts=num_experts)

    def on_routed(self, layer: int, tokens_per_expert: Mapping[int, int]) -> None:
        # The previous layer's choices have been computed, even if a tier above had them.
        self._unprotect_others(self.layer_now, ())
        self.layer_now = layer
        self._unprotect_others(layer, tokens_per_expert)

    def _unprotect_others(self, layer: int, chosen: Collection[int]) -> None:
        if layer in self._order_of_layer:
            self._order_of_layer[layer].unprotect_others(layer, chosen)

    def may_evict_for(self, victim: Expert, newcomer: Expert) -> bool:  # noqa: ARG002
        """Returns False for a protected expert: it was fetched before, so it is needed more."""
        return not self._order_of_layer[victim[0]].is_protected(victim)

    def end_step(self) -> None:
        self._unprotect_others(self.layer_now, ())
        self.layer_now = -1
