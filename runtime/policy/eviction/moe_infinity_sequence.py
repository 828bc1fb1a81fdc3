"""Eviction by activation ratio x layer decay. Shape suffixes: L layers, E experts."""

from collections.abc import Mapping

import numpy as np

from runtime.policy.eviction.protocol import EvictionOrder, EvictionPolicy
from runtime.policy.eviction.score_order import ScoreOrder, view_scores

EPSILON = 1e-6
"""Lets the layer decay order experts whose ratio is 0, as in section 5.2; far below 1 / tokens."""


def layer_decay(num_layers: int) -> np.ndarray:
    """Returns `[L]`: `1 - l / L`, linear, which favours experts nearer the first layer."""
    return 1.0 - np.arange(num_layers) / num_layers


class MoeInfinitySequenceEviction(EvictionPolicy):
    """Evicts the lowest `(ratio + epsilon) * (1 - l / L)`.

    MoE-Infinity (sequence level), algorithm 2. `ratio` is the expert's share of its layer's tokens
    in the current EAM, which is empty when a sequence starts and is updated as soon as a router has
    run (algorithm 1, steps 2, 6 and 7). Ties go to the least recently touched expert.
    """

    def __init__(self, *, num_layers: int, num_experts: int):
        self._eam_LE = np.zeros((num_layers, num_experts))
        self._decay_L = layer_decay(num_layers)
        self._score_LE = np.zeros((num_layers, num_experts))
        self._reset()

    def make_order(self, *, num_slots: int, layers: range) -> EvictionOrder:  # noqa: ARG002
        scores = view_scores(self._score_LE, layers)
        return ScoreOrder(scores, layers=layers, num_experts=self._eam_LE.shape[1])

    def _reset(self) -> None:
        self._eam_LE[:] = 0.0
        self._score_LE[:] = EPSILON * self._decay_L[:, None]

    def begin_step(self, new_request: bool) -> None:
        if new_request:
            self._reset()

    def on_routed(self, layer: int, tokens_per_expert: Mapping[int, int]) -> None:
        if not tokens_per_expert:
            return
        eam_E = self._eam_LE[layer]
        eam_E[list(tokens_per_expert)] += list(tokens_per_expert.values())
        ratio_E = eam_E / eam_E.sum()
        self._score_LE[layer] = (ratio_E + EPSILON) * self._decay_L[layer]
