"""Eviction without training: the best of several counts, chosen by what each would have hit.

Shape suffixes: L layers, E experts, A arms.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from predictors.base import Ints
from runtime.policy.eviction.decayed_lfu import DECAYS, DecayedCounts
from runtime.policy.eviction.distance_discount import DistanceDiscount
from runtime.policy.eviction.ghost_caches import GhostCaches
from runtime.policy.eviction.protocol import EvictionOrder, EvictionPolicy
from runtime.policy.eviction.score_order import COMPILED, ScoreOrder, Scores, view_scores

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
        self._num_experts = num_experts
        self._last_step_LE = np.zeros((num_layers, num_experts))
        self._step = 0
        self._blended = [(DECAYS.index(decay), weight) for decay, weight in BLENDED.items()]
        """Arms of `_counts` and their weights in the arm `blend`."""
        self._blended_arm = np.array([arm for arm, _ in self._blended], dtype=np.int64)
        self._blended_weight = np.array([weight for _, weight in self._blended])
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
        for e in tokens_per_expert:
            self._last_step_LE[layer, e] = self._step
        if layer in self.ghosts.layers:
            self.ghosts.on_routed(layer, tokens_per_expert, self.of_all_arms(layer))

    def end_step(self) -> None:
        self.ghosts.end_step()

    def of_all_arms(self, layer: int) -> NDArray[np.float64]:
        """Returns `[E, A]`: the shares by every arm of a layer that this step has routed."""
        share_EA = np.empty((self._num_experts, len(ARMS)))
        if COMPILED:
            self._write_shares(layer, share_EA)
            return share_EA
        decayed_EA = self._counts.shares(layer)
        share_EA[:, 0] = self._blend(decayed_EA)
        share_EA[:, 1] = decayed_EA[:, self._forever] / self._ages(layer)
        share_EA[:, 2:] = decayed_EA
        return share_EA

    def of_layer(self, layer: int) -> NDArray[np.float64]:
        """Returns `[E]`: the shares by the best arm of a layer that this step has routed."""
        arm = self.ghosts.arm
        if arm == 0:
            return self._blend(self._counts.shares(layer))
        if arm == 1:
            return self._counts.shares_of_arm(layer, self._forever) / self._ages(layer)
        return self._counts.shares_of_arm(layer, arm - 2)

    def _write_shares(self, layer: int, share_EA: Scores) -> None:
        """Does what `of_all_arms` does, expert by expert."""
        counts, num_decays, num_blended = self._counts, len(DECAYS), len(self._blended)
        for e in range(self._num_experts):
            for a in range(num_decays):
                share_EA[e, 2 + a] = counts.view_LEA[layer, e, a] / counts.most_A[a]
            blend = 0.0
            for i in range(num_blended):
                blend += share_EA[e, 2 + self._blended_arm[i]] * self._blended_weight[i]
            share_EA[e, 0] = blend
            age = (self._step - self._last_step_LE[layer, e]) + 1.0
            share_EA[e, 1] = share_EA[e, 2 + self._forever] / age

    def _blend(self, decayed_EA: NDArray[np.float64]) -> NDArray[np.float64]:
        # One after another, as `_write_shares` does: a product of matrices may round otherwise.
        blend_E = np.zeros(len(decayed_EA))
        for arm, weight in self._blended:
            blend_E += decayed_EA[:, arm] * weight
        return blend_E

    def decayed(self, layer: int, decay: float) -> NDArray[np.float64]:
        """Returns `[E]`: the shares at one of `DECAYS` of a layer that this step has routed."""
        return self._counts.shares_of_arm(layer, DECAYS.index(decay))

    def _ages(self, layer: int) -> NDArray[np.float64]:
        """Returns `[E]`: steps since the last use of each expert, the step of the use included."""
        return (self._step - np.asarray(self._last_step_LE[layer])) + 1.0


class RegretEviction(EvictionPolicy):
    """Evicts the expert whose next use is expected latest, by the counts that have hit most.

    It needs neither training nor options: see `UseShares` for the counts that compete, and
    `GhostCaches` for the choice. It is `reuse` eviction without predictions.
    """

    def __init__(self, *, num_layers: int, num_experts: int):
        self._shares = UseShares(num_layers=num_layers, num_experts=num_experts)
        self._discount = DistanceDiscount(num_layers=num_layers, num_experts=num_experts)
        self._num_experts = num_experts
        self._layer_now = -1
        """The last layer whose router has run."""
        self._is_outdated = False
        """The scores are those of an earlier layer."""

    @property
    def arm(self) -> str:
        """Name of the arm that is followed."""
        return self._shares.arm

    def make_order(self, *, num_slots: int, layers: range) -> EvictionOrder:
        self._shares.ghosts.divide(num_slots, layers)
        view = view_scores(self._discount.score_LE, layers)

        def scores() -> Scores:
            if self._is_outdated:
                self._is_outdated = False
                self._discount.compute(self._layer_now)
            return view()

        return ScoreOrder(scores, layers=layers, num_experts=self._num_experts)

    def begin_step(self, requests_T: Ints) -> None:  # noqa: ARG002
        self._shares.begin_step()

    def on_routed(self, layer: int, tokens_per_expert: Mapping[int, int]) -> None:
        self._shares.on_routed(layer, tokens_per_expert)
        self._discount.set_shares(layer, self._shares.of_layer(layer))
        self._layer_now = layer
        self._is_outdated = True

    def end_step(self) -> None:
        self._shares.end_step()
