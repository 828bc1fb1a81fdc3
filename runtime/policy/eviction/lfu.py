"""LFU. Shape suffixes: L layers, E experts."""

from collections.abc import Mapping

import numpy as np

from runtime.policy.eviction.protocol import EvictionOrder, EvictionPolicy
from runtime.policy.eviction.score_order import ScoreOrder, view_scores


class LfuEviction(EvictionPolicy):
    """Evicts the expert that the fewest steps since the start requested, resident or not.

    BrainStorm's policy: MoE-Infinity (request level), section 7.3, model-level counts. Ties go to
    the least recently touched expert.
    """

    def __init__(self, *, num_layers: int, num_experts: int):
        self._uses_LE = np.zeros((num_layers, num_experts))

    def make_order(self, *, num_slots: int, layers: range) -> EvictionOrder:  # noqa: ARG002
        scores = view_scores(self._uses_LE, layers)
        return ScoreOrder(scores, layers=layers, num_experts=self._uses_LE.shape[1])

    def on_routed(self, layer: int, tokens_per_expert: Mapping[int, int]) -> None:
        self._uses_LE[layer, list(tokens_per_expert)] += 1
