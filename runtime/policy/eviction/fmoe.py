"""Eviction by probability x frequency. Shape suffixes: L layers, E experts."""

from collections.abc import Mapping

import numpy as np

from runtime.policy.eviction.protocol import EvictionOrder, EvictionPolicy, Probabilities
from runtime.policy.eviction.score_order import ScoreOrder, view_scores


class FmoeEviction(EvictionPolicy):
    """Evicts the expert with the highest `1 / (p * freq)` (fMoE, section 4.5).

    `p` is the latest forecast of the expert (in fMoE: the expert map's that the search found), 1
    before any. `freq` counts the steps that visited the expert since the start; an eviction does
    not reset it. Ties go to the least recently touched expert.
    """

    def __init__(self, *, num_layers: int, num_experts: int):
        shape = num_layers, num_experts
        self._probability_LE = np.ones(shape)
        self._visits_LE = np.zeros(shape)
        self._score_LE = np.zeros(shape)

    def make_order(self, *, num_slots: int, layers: range) -> EvictionOrder:  # noqa: ARG002
        scores = view_scores(self._score_LE, layers)
        return ScoreOrder(scores, layers=layers, num_experts=self._score_LE.shape[1])

    def on_routed(self, layer: int, tokens_per_expert: Mapping[int, int]) -> None:
        self._visits_LE[layer, list(tokens_per_expert)] += 1
        self._update(layer)

    def on_forecast(self, layer: int, probability_E: Probabilities) -> None:
        self._probability_LE[layer] = probability_E
        self._update(layer)

    def _update(self, layer: int) -> None:
        self._score_LE[layer] = self._probability_LE[layer] * self._visits_LE[layer]
