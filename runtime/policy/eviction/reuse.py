"""Drops what a learned forecast of the coming tokens values least.

Shape suffixes: L layers, E experts.
"""

from collections.abc import Mapping

import numpy as np

from runtime.policy.eviction.protocol import Eviction, EvictionPolicy, Probabilities
from runtime.policy.eviction.scored import Scored, of_layers

FALLBACK_DECAY = 0.95
UNKNOWN = 1e-3
"""Weight of the counts that stand in for a layer's values until its first forecast."""


class Reuse(EvictionPolicy):
    """The value of an expert is what `predictors.reuse` last said of it: its use over the coming
    tokens. A layer that was never valued goes by its own fading counts, below every value."""

    def __init__(self, *, num_layers: int, num_experts: int):
        self._score_LE = np.zeros((num_layers, num_experts))
        self._valued_L = np.zeros(num_layers, dtype=bool)

    def part(self, *, num_slots: int, layers: range) -> Eviction:  # noqa: ARG002
        scores = of_layers(self._score_LE, layers)
        return Scored(scores, layers=layers, num_experts=self._score_LE.shape[1])

    def routed(self, layer: int, tokens_per_expert: Mapping[int, int]) -> None:
        if not self._valued_L[layer]:
            self._score_LE[layer] *= FALLBACK_DECAY
            for e in tokens_per_expert:
                self._score_LE[layer, e] += UNKNOWN

    def valued(self, layer: int, value_E: Probabilities) -> None:
        self._valued_L[layer] = True
        self._score_LE[layer] = value_E
