"""Activation ratio x layer decay. Shape suffixes: L layers, E experts."""

from collections.abc import Mapping

import numpy as np

from runtime.policy.eviction.protocol import Eviction, EvictionPolicy
from runtime.policy.eviction.scored import Scored, of_layers

EPSILON = 1e-6
"""Lets the layer decay order experts whose ratio is 0, as in 5.2; far below 1 / tokens."""


def layer_decay(num_layers: int) -> np.ndarray:
    """`[L]`: `1 - l / L`, linear, so that experts nearer the first layer are worth more."""
    return 1.0 - np.arange(num_layers) / num_layers


class MoeInfinitySequence(EvictionPolicy):
    """moe-infinity-sequence-level algorithm 2: the lowest `(ratio + epsilon) * (1 - l / L)` goes.

    `ratio` is the expert's share of its layer's tokens in the current EAM, which starts empty with
    each sequence and is updated as soon as a router has spoken (algorithm 1, steps 2, 6 and 7).
    Ties go to the least recently touched.
    """

    def __init__(self, *, num_layers: int, num_experts: int):
        self._eam_LE = np.zeros((num_layers, num_experts))
        self._decay_L = layer_decay(num_layers)
        self._priority_LE = np.zeros((num_layers, num_experts))
        self._forget()

    def part(self, *, num_slots: int, layers: range) -> Eviction:  # noqa: ARG002
        scores = of_layers(self._priority_LE, layers)
        return Scored(scores, layers=layers, num_experts=self._eam_LE.shape[1])

    def _forget(self) -> None:
        self._eam_LE[:] = 0.0
        self._priority_LE[:] = EPSILON * self._decay_L[:, None]

    def begin_step(self, new_request: bool) -> None:
        if new_request:
            self._forget()

    def routed(self, layer: int, tokens_per_expert: Mapping[int, int]) -> None:
        if not tokens_per_expert:
            return
        eam_E = self._eam_LE[layer]
        eam_E[list(tokens_per_expert)] += list(tokens_per_expert.values())
        ratio_E = eam_E / eam_E.sum()
        self._priority_LE[layer] = (ratio_E + EPSILON) * self._decay_L[layer]
