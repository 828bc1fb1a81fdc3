"""Probability x frequency. Shape suffixes: L layers, E experts."""

from collections.abc import Mapping

import numpy as np

from runtime.policy.eviction.protocol import Eviction, EvictionPolicy, Probabilities
from runtime.policy.eviction.scored import Scored, of_layers


class Fmoe(EvictionPolicy):
    """fmoe 4.5: the highest eviction priority `1 / (p * freq)` goes, so the lowest `p * freq`.

    `p` is the latest forecast of the expert (fmoe: the searched expert map's), 1 before any.
    `freq` counts the steps that visited the expert since the start; an eviction does not reset it.
    Ties go to the least recently touched.
    """

    def __init__(self, *, num_layers: int, num_experts: int):
        shape = num_layers, num_experts
        self._probability_LE = np.ones(shape)
        self._visits_LE = np.zeros(shape)
        self._worth_LE = np.zeros(shape)

    def part(self, *, num_slots: int, layers: range) -> Eviction:  # noqa: ARG002
        scores = of_layers(self._worth_LE, layers)
        return Scored(scores, layers=layers, num_experts=self._worth_LE.shape[1])

    def routed(self, layer: int, tokens_per_expert: Mapping[int, int]) -> None:
        self._visits_LE[layer, list(tokens_per_expert)] += 1
        self._weigh(layer)

    def forecast(self, layer: int, probability_E: Probabilities) -> None:
        self._probability_LE[layer] = probability_E
        self._weigh(layer)

    def _weigh(self, layer: int) -> None:
        self._worth_LE[layer] = self._probability_LE[layer] * self._visits_LE[layer]
