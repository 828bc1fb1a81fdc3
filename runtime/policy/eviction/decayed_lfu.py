"""LFU whose counts decay, at the rate that has served best so far.

Shape suffixes: L layers, E experts, A arms (decays).
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from predictors.base import Ints
from predictors.errors import MoecastError
from runtime.policy.eviction.ghost_caches import GhostCaches
from runtime.policy.eviction.protocol import EvictionOrder, EvictionPolicy
from runtime.policy.eviction.score_order import COMPILED, ScoreOrder, Scores

DECAYS = (0.5, 0.8, 0.9, 0.95, 0.98, 1.0)
"""Factors per step. Up to .5 the last step to use an expert decides, as in LRU; 1 is LFU."""

START = 0.95
"""The nearest decay is used before anything was measured."""

LARGEST_WEIGHT = 1e100
"""Scores are rescaled above this weight: sums stay far from the largest double."""


class DecayedCounts:
    """Uses of each expert, weighted by `decay ** (steps since)`, for several decays.

    The weight of a use is 1 where a step has one token, else the expert's tokens over those of the
    busiest expert: a prefill requests almost all experts, and only their tokens tell them apart.
    """

    def __init__(self, *, num_layers: int, num_experts: int, decays: Sequence[float]):
        if not decays or not all(0.0 < decay <= 1.0 for decay in decays):
            raise MoecastError(f"decayed-lfu eviction: decays={list(decays)}: each in (0, 1]")
        self.decay_A = np.array(decays)
        self._num_experts = num_experts
        self._num_arms = len(decays)
        self.score_LEA = np.zeros((num_layers, num_experts, len(decays)))
        self.view_LEA = self.score_LEA
        self._weight_A = np.ones(len(decays))
        """The increment of a use in this step: it grows by 1 / decay per step, so that past uses
        need not be touched to decay."""
        self._total_A = np.zeros(len(decays))
        """The score in this step of an expert that every step used, over the weight."""
        self.most_A = np.ones(len(decays))
        """The score in this step of an expert that every step used."""

    def begin_step(self) -> None:
        self._total_A = self._total_A * self.decay_A + 1.0
        self._weight_A /= self.decay_A
        if self._weight_A.max() > LARGEST_WEIGHT:
            self.score_LEA /= self._weight_A
            self._weight_A[:] = 1.0
        self.most_A = self._weight_A * np.maximum(self._total_A, 1.0)

    def on_routed(self, layer: int, tokens_per_expert: Mapping[int, int]) -> None:
        if not tokens_per_expert:
            return
        chosen, tokens_K = list(tokens_per_expert), list(tokens_per_expert.values())
        most = max(tokens_K)
        if COMPILED:
            self._add_uses(layer, chosen, tokens_K, most, self._weight_A)
            return
        if most == min(tokens_K):
            self.score_LEA[layer, chosen] += self._weight_A
        else:
            share_K = np.array(tokens_K) / most
            self.score_LEA[layer, chosen] += share_K[:, None] * self._weight_A

    def _add_uses(
        self, layer: int, chosen: list[int], tokens_K: list[int], most: float, weight_A: Scores
    ) -> None:
        for k in range(len(chosen)):
            e, share = chosen[k], tokens_K[k] / most
            for a in range(self._num_arms):
                self.view_LEA[layer, e, a] += share * weight_A[a]

    def shares(self, layer: int) -> NDArray[np.float64]:
        """Returns `[E, A]`: the decayed share of past steps that used each expert, in [0, 1]."""
        return np.asarray(self.score_LEA[layer] / self.most_A)

    def shares_of_arm(self, layer: int, arm: int) -> NDArray[np.float64]:
        """Returns `[E]`: one column of `shares`."""
        if COMPILED:
            share_E = np.empty(self._num_experts)
            self.write_shares(layer, arm, share_E)
            return share_E
        return np.asarray(self.score_LEA[layer, :, arm] / self.most_A[arm])

    def write_shares(self, layer: int, arm: int, share_E: Scores) -> None:
        most = self.most_A[arm]
        for e in range(self._num_experts):
            share_E[e] = self.view_LEA[layer, e, arm] / most


class DecayedLfuEviction(EvictionPolicy):
    """Evicts the lowest `sum over the expert's uses of weight * decay ** (steps since)`.

    The decays are arms of `GhostCaches`: when a step ends, the one that would have hit most is used
    for all layers. All is deterministic. The choice is made online because the best decay differs
    by model, text and budget.
    """

    def __init__(self, *, num_layers: int, num_experts: int, decays: Sequence[float] = DECAYS):
        shape = {"num_layers": num_layers, "num_experts": num_experts}
        self.decays = tuple(decays)
        self._counts = DecayedCounts(**shape, decays=decays)
        start = min(range(len(decays)), key=lambda arm: abs(decays[arm] - START))
        self._ghosts = GhostCaches(**shape, num_arms=len(decays), start=start)

    @property
    def arm(self) -> int:
        """Index in `decays` of the decay in use."""
        return self._ghosts.arm

    def make_order(self, *, num_slots: int, layers: range) -> EvictionOrder:
        self._ghosts.divide(num_slots, layers)
        score_LEA = self._counts.score_LEA

        def scores() -> Scores:
            return score_LEA[layers.start : layers.stop, :, self.arm].reshape(-1)

        return ScoreOrder(scores, layers=layers, num_experts=score_LEA.shape[1])

    def begin_step(self, requests_T: Ints) -> None:  # noqa: ARG002
        self._counts.begin_step()

    def on_routed(self, layer: int, tokens_per_expert: Mapping[int, int]) -> None:
        self._counts.on_routed(layer, tokens_per_expert)
        self._ghosts.on_routed(layer, tokens_per_expert, self._counts.score_LEA[layer])

    def end_step(self) -> None:
        self._ghosts.end_step()
