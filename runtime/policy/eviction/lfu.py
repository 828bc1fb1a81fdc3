"""Least often used first. Shape suffixes: L layers, E experts."""

from collections.abc import Mapping

import numpy as np

from runtime.policy.eviction.protocol import Eviction, EvictionPolicy
from runtime.policy.eviction.scored import Scored, of_layers


class Lfu(EvictionPolicy):
    """How many steps asked for an expert since the start of the run, whether resident or not.

    BrainStorm's policy (moe-infinity-request-level 7.3: model-level counts). Ties go to the least
    recently touched.
    """

    def __init__(self, *, num_layers: int, num_experts: int):
        self._uses_LE = np.zeros((num_layers, num_experts))

    def part(self, *, num_slots: int, layers: range) -> Eviction:  # noqa: ARG002
        scores = of_layers(self._uses_LE, layers)
        return Scored(scores, layers=layers, num_experts=self._uses_LE.shape[1])

    def routed(self, layer: int, tokens_per_expert: Mapping[int, int]) -> None:
        self._uses_LE[layer, list(tokens_per_expert)] += 1
