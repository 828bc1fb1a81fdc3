"""Eviction without training: the best of several counts, chosen by what each would have hit.

Shape suffixes: L layers, E experts, A arms.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from predictors.base import Ints
from runtime.policy.eviction.decayed_lfu import DECAYS, DecayedCounts
from runtime.policy.eviction.ghost_caches import GhostCaches
from runtime.policy.eviction.protocol import EvictionOrder, EvictionPolicy
from runtime.policy.eviction.score_order import ScoreOrder, view_scores

BLENDED = {0.5: 0.2, 0.9: 0.3, 0.98: 0.5}
"""Decays and weights of the arm `blend`: an expert used lately and one used often both stay."""

DECAY_NAMES = {0.5: "lru", 1.0: "lfu"}
"""At a decay of .5 the last step to use an expert decides; at 1 all steps count alike."""

ARMS = ("blend", "lfru", *(DECAY_NAMES.get(decay, f"decayed-lfu {decay}") for decay in DECAYS))
"""Scores that compete; the first is followed before anything was measured."""

SURE = 2.0
"""Standard deviations by which an arm must lead to be followed: with less, the arms changed by
chance, and at a budget of 10 % the hit rate fell from .588 to .560 (Qwen3-30B-A3B's routing) and
from .399 to .365 (the reference model's)."""


class UseShares:
    """The share of steps that use each expert, as the arm that has hit most estimates it.

    Every arm of `ARMS` estimates the probability that a step uses the expert: the decayed share of
    past steps (LRU and LFU are the extremes), the mean of a fast, a middle and a slow one, and LFRU
    (arXiv 2608.07911), the share of all steps over the steps since the last use.
    """

    def __init__(self, *, num_layers: int, num_experts: int):
        shape = {"num_layers": num_layers, "num_experts": num_experts}
        self._counts = DecayedCounts(**shape, decays=DECAYS)
        self.ghosts = GhostCaches(**shape, num_arms=len(ARMS), sure=SURE)
        self._share_LEA = np.zeros((num_layers, num_experts, len(ARMS)))
        self._last_step_LE = np.zeros((num_layers, num_experts))
        self._step = 0
        self._blend_A = np.array([BLENDED.get(decay, 0.0) for decay in DECAYS])
        self._forever = DECAYS.index(1.0)

    @property
    def arm(self) -> str:
        """Name of the arm that is followed."""
        return ARMS[self.ghosts.arm]

    def begin_step(self) -> None:
        self._step += 1
        self._counts.begin_step()

    def on_routed(self, layer: int, tokens_per_expert: Mapping[int, int]) -> None:
        self._counts.on_routed(layer, tokens_per_expert)
        self._last_step_LE[layer, list(tokens_per_expert)] = self._step
        age_E = self._step - self._last_step_LE[layer]
        decayed_EA = self._counts.shares(layer)
        share_EA = self._share_LEA[layer]
        share_EA[:, 0] = decayed_EA @ self._blend_A
        share_EA[:, 1] = decayed_EA[:, self._forever] / (age_E + 1.0)
        share_EA[:, 2:] = decayed_EA
        self.ghosts.on_routed(layer, tokens_per_expert, share_EA)

    def end_step(self) -> None:
        self.ghosts.end_step()

    def of_layer(self, layer: int) -> NDArray[np.float64]:
        """Returns `[E]`: the shares that the best arm gave when the layer was last routed."""
        return np.asarray(self._share_LEA[layer, :, self.ghosts.arm])

    def decayed(self, layer: int, decay: float) -> NDArray[np.float64]:
        """Returns `[E]`: the shares at one of `DECAYS`."""
        return np.asarray(self._share_LEA[layer, :, 2 + DECAYS.index(decay)])


LEAST_SHARE = 1e-6
"""Share of steps that an expert without uses is given: far below one use in any log."""


def discount_by_distance(share_LE: NDArray, layer_now: int) -> NDArray:
    """Returns `[L, E]`: `1 / (1 / share + d / L)`, for layers that are `d` layers ahead.

    It is the reciprocal of the expected time until the next use, in steps: an expert that every
    second step uses is worth less where its layer has just been computed than where it is next.
    Experts that were never used count as used once in a very long time, so that those of the
    farthest layer go first among them, too.
    """
    share_LE = np.maximum(share_LE, LEAST_SHARE)
    num_layers = len(share_LE)
    distance_L = (np.arange(num_layers) - layer_now - 1) % num_layers / num_layers
    return np.asarray(share_LE / (1.0 + share_LE * distance_L[:, None]))


class RegretEviction(EvictionPolicy):
    """Evicts the expert whose next use is expected latest, by the counts that have hit most.

    It needs neither training nor options: see `UseShares` for the counts that compete, and
    `GhostCaches` for the choice. It is `reuse` eviction without predictions.
    """

    def __init__(self, *, num_layers: int, num_experts: int):
        self._shares = UseShares(num_layers=num_layers, num_experts=num_experts)
        self._share_LE = np.zeros((num_layers, num_experts))
        self._score_LE = np.zeros((num_layers, num_experts))

    @property
    def arm(self) -> str:
        """Name of the arm that is followed."""
        return self._shares.arm

    def make_order(self, *, num_slots: int, layers: range) -> EvictionOrder:
        self._shares.ghosts.divide(num_slots, layers)
        scores = view_scores(self._score_LE, layers)
        return ScoreOrder(scores, layers=layers, num_experts=self._score_LE.shape[1])

    def begin_step(self, requests_T: Ints) -> None:  # noqa: ARG002
        self._shares.begin_step()

    def on_routed(self, layer: int, tokens_per_expert: Mapping[int, int]) -> None:
        self._shares.on_routed(layer, tokens_per_expert)
        self._share_LE[layer] = self._shares.of_layer(layer)
        self._score_LE[:] = discount_by_distance(self._share_LE, layer)

    def end_step(self) -> None:
        self._shares.end_step()
