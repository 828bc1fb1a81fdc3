"""Small caches of ids that tell which of several scores would have hit most.

Shape suffixes: E experts, A arms, K experts chosen in the step.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from runtime.policy.eviction.score_order import COMPILED, Scores

MEMORY = 0.998
"""Factor per step on the arms' past hits: a memory of some five hundred steps, which notices a
change and does not swap two equally good arms back and forth."""

NUM_SAMPLED_LAYERS = 4
"""Layers with ghost caches, evenly spread; they stand for all layers."""


class GhostCaches:
    """Follows the arm whose ghost caches have hit most, recent steps counting most.

    An arm is a score per expert. In a few layers, each arm has a ghost cache, of ids only and as
    large as the layer's share of the cache, on the same routing. Following the arm with the fewest
    misses so far is what keeps regret small: the misses beyond those of the best arm. Arms chosen
    by their realised hits are from LeCaR (Vietri et al., HotStorage 2018) and antirez/ds4 636,
    sampled layers that stand for the rest from set dueling (Qureshi et al., ISCA 2007).

    Args:
        num_layers: Layers of the model.
        num_experts: Experts of each layer.
        num_arms: Scores to compare.
        start: Arm to follow before anything was measured.
        sure: Standard deviations of its hits, the square root of their number, by which another
            arm must lead to be followed instead. The best of several equal arms leads by chance.
    """

    def __init__(
        self, *, num_layers: int, num_experts: int, num_arms: int, start: int = 0, sure: float = 0.0
    ):
        self.arm = start
        self._sure = sure
        self._hits_A = np.zeros(num_arms)
        num_sampled = min(NUM_SAMPLED_LAYERS, num_layers) if num_arms > 1 else 0
        self.layers = {
            (2 * i + 1) * num_layers // (2 * num_sampled): LayerGhost(num_experts, num_arms)
            for i in range(num_sampled)
        }

    @property
    def hits(self) -> float:
        """Hits of the best arm."""
        return float(self._hits_A.max())

    def divide(self, num_slots: int, layers: range) -> None:
        """Gives the ghosts of these layers their shares of `num_slots`."""
        for layer in layers:
            if layer in self.layers:
                self.layers[layer].num_slots = max(1, num_slots // len(layers))

    def on_routed(self, layer: int, tokens_per_expert: Mapping[int, int], score_EA: Scores) -> None:
        """Serves the chosen experts from the layer's ghosts, if it is sampled."""
        ghost = self.layers.get(layer)
        if ghost is not None:
            self._hits_A += ghost.serve(list(tokens_per_expert), score_EA)

    def end_step(self) -> None:
        best = int(self._hits_A.argmax())
        lead = self._hits_A[best] - self._hits_A[self.arm]
        if lead > self._sure * self._hits_A[self.arm] ** 0.5:
            self.arm = best
        self._hits_A *= MEMORY


class LayerGhost:
    """The experts that one layer's share of the cache would hold under each arm."""

    def __init__(self, num_experts: int, num_arms: int):
        self.num_slots = num_experts
        self._num_experts = num_experts
        self._num_arms = num_arms
        self._resident_EA = np.zeros((num_experts, num_arms), dtype=bool)
        self._is_resident_EA = self._resident_EA.view(np.uint8)
        self._no_hits_A = np.zeros(num_arms, dtype=np.int64)
        self._hits_A = np.zeros(num_arms, dtype=np.int64)
        self._num_hits_A = self._hits_A
        # Distinct factors next to 1: equal scores must not make a ghost larger than its slots.
        self._tie_E = 1.0 - 1e-9 * np.arange(num_experts)
        self._key_E = np.empty(num_experts)
        self._lowest_E = np.empty(num_experts)

    def serve(self, chosen_K: list[int], score_EA: Scores) -> NDArray[np.int64]:
        """Admits the chosen experts and evicts the lowest scores.

        Returns `[A]` hits, to be read before the next call.
        """
        if COMPILED and len(chosen_K) < self.num_slots:
            self._serve(chosen_K, score_EA)
            return self._hits_A
        is_hit_KA = self._resident_EA[chosen_K]
        if len(chosen_K) >= self.num_slots:
            # More than fits: the best of them stay, and the hits are no evidence of what to keep.
            key_EA = np.full_like(score_EA, -1.0)
            key_EA[chosen_K] = (score_EA * self._tie_E[:, None])[chosen_K]
            self._keep(key_EA)
            return self._no_hits_A
        if not is_hit_KA.all():
            key_EA = np.where(self._resident_EA, score_EA * self._tie_E[:, None], -1.0)
            key_EA[chosen_K] = np.inf
            self._keep(key_EA)
        return np.add.reduce(is_hit_KA, axis=0, dtype=np.int64)

    def _serve(self, chosen_K: list[int], score_EA: Scores) -> None:
        """Does what `serve` does, arm by arm, and sets `_hits_A`."""
        num_dropped, missed = self._num_experts - self.num_slots, False
        for a in range(self._num_arms):
            num_hits = 0
            for e in chosen_K:
                num_hits += self._is_resident_EA[e, a]
            self._num_hits_A[a] = num_hits
            missed = missed or num_hits < len(chosen_K)
        if not missed:
            return
        for a in range(self._num_arms):
            num_absent = 0
            for e in range(self._num_experts):
                if self._is_resident_EA[e, a]:
                    self._key_E[e] = score_EA[e, a] * self._tie_E[e]
                else:
                    self._key_E[e] = -1.0
                    num_absent += 1
            for e in chosen_K:
                self._key_E[e] = np.inf
                num_absent -= not self._is_resident_EA[e, a]
            least = self._find_least(num_dropped - num_absent) if num_dropped >= num_absent else 0.0
            for e in range(self._num_experts):
                self._is_resident_EA[e, a] = self._key_E[e] >= least

    def _find_least(self, rank: int) -> float:
        """Returns the key above which there are all but `rank` of those that are not negative."""
        num_kept = 0
        for e in range(self._num_experts):
            key = self._key_E[e]
            if key < 0.0 or (num_kept > rank and key >= self._lowest_E[rank]):
                continue
            i = min(num_kept, rank)
            while i > 0 and self._lowest_E[i - 1] > key:
                self._lowest_E[i] = self._lowest_E[i - 1]
                i -= 1
            self._lowest_E[i] = key
            num_kept += 1
        return self._lowest_E[rank]

    def _keep(self, key_EA: Scores) -> None:
        """Keeps the `num_slots` highest keys of each arm that are not negative."""
        num_dropped = len(key_EA) - self.num_slots
        if num_dropped <= 0:
            np.greater_equal(key_EA, 0.0, out=self._resident_EA)
            return
        ascending_EA = key_EA.copy()
        ascending_EA.partition(num_dropped, axis=0)
        least_A = np.maximum(ascending_EA[num_dropped], 0.0)
        np.greater_equal(key_EA, least_A, out=self._resident_EA)
