"""The discount of what an expert is worth by the time until its layer comes.

Shape suffixes: L layers, E experts.
"""

import numpy as np

from runtime.policy.eviction.score_order import COMPILED, Scores

LEAST_SHARE = 1e-6
"""Share of steps that an expert without uses is given: far below one use in any log."""


class DistanceDiscount:
    """Scores `1 / (1 / share + d / L)`, for layers that are `d` layers ahead.

    That is the reciprocal of the expected time until the next use, in steps: an expert that every
    second step uses is worth less where its layer has just been computed than where it is next.
    Experts that were never used count as used once in a very long time, so that those of the
    farthest layer go first among them, too.

    Every score changes with every layer, so they are computed only where an expert is evicted.
    """

    def __init__(self, *, num_layers: int, num_experts: int):
        self._num_layers = num_layers
        self._num_experts = num_experts
        self.score_LE = np.zeros((num_layers, num_experts))
        """The scores that were computed last."""
        self._view_LE = self.score_LE
        self._share_LE = np.full((num_layers, num_experts), LEAST_SHARE)
        self._slowed_LE = np.empty((num_layers, num_experts))
        layers_L = np.arange(num_layers)
        self._distance_LL = (layers_L - layers_L[:, None] - 1) % num_layers / num_layers
        """How far ahead each layer is, as a share of a step, when a layer has been routed."""

    def set_shares(self, layer: int, share_E: Scores) -> None:
        """Sets the share of steps that use each of the layer's experts."""
        if COMPILED:
            least = LEAST_SHARE
            for e in range(self._num_experts):
                self._share_LE[layer, e] = max(share_E[e], least)
        else:
            np.maximum(share_E, LEAST_SHARE, out=self._share_LE[layer])

    def compute(self, layer_now: int) -> None:
        """Computes the scores after `layer_now` was routed; -1: when a step begins."""
        if COMPILED:
            for layer in range(self._num_layers):
                distance = self._distance_LL[layer_now, layer]
                for e in range(self._num_experts):
                    share = self._share_LE[layer, e]
                    self._view_LE[layer, e] = share / (share * distance + 1.0)
            return
        distance_L1 = self._distance_LL[layer_now][:, None]
        np.multiply(self._share_LE, distance_L1, out=self._slowed_LE)
        self._slowed_LE += 1.0
        np.divide(self._share_LE, self._slowed_LE, out=self.score_LE)
