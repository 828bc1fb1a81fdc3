"""LFU whose counts decay, at the rate that has served best so far.

Shape suffixes: L layers, E experts, A arms (decays), K experts chosen in the step.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from predictors.errors import MoecastError
from runtime.policy.eviction.protocol import EvictionOrder, EvictionPolicy
from runtime.policy.eviction.score_order import ScoreOrder, Scores

DECAYS = (0.5, 0.8, 0.9, 0.95, 0.98, 1.0)
"""Factors per step. Up to .5 the last step to use an expert decides, as in LRU; 1 is LFU."""

START = 0.95
"""The nearest decay is used before anything was measured."""

MEMORY = 0.998
"""Factor per step on the arms' past hits: a memory of some five hundred steps, which notices a
change and does not swap two equally good decays back and forth."""

NUM_SAMPLED_LAYERS = 4
"""Layers with shadow caches, evenly spread; they stand for all layers."""

LARGEST_WEIGHT = 1e100
"""Scores are rescaled above this weight: sums stay far from the largest double."""


class DecayedLfuEviction(EvictionPolicy):
    """Evicts the lowest `sum over the expert's uses of weight * decay ** (steps since)`.

    The weight is 1 where a step has one token, else the expert's tokens over those of the busiest
    expert: a prefill requests almost all experts, and only their tokens tell them apart.

    For every decay, a few layers run a shadow cache (ids only, as large as the layer's share of the
    cache) on the same routing. When a step ends, the decay whose shadows have hit most, recent
    steps counting most, is used for all layers. All is deterministic. The choice is made online
    because the best decay differs by model, text and budget. Several decays as arms chosen by their
    realised hits are from antirez/ds4 636, sampled layers that stand for the rest from set dueling
    (Qureshi et al., ISCA 2007).
    """

    def __init__(self, *, num_layers: int, num_experts: int, decays: Sequence[float] = DECAYS):
        if not decays or not all(0.0 < decay <= 1.0 for decay in decays):
            raise MoecastError(f"decayed-lfu eviction: decays={list(decays)}: each in (0, 1]")
        self.decays = tuple(decays)
        self.arm = min(range(len(decays)), key=lambda arm: abs(decays[arm] - START))
        """Index in `decays` of the decay in use."""
        self._decay_A = np.array(decays)
        self._weight_A = np.ones(len(decays))
        """The increment of a use in this step: it grows by 1 / decay per step, so that past uses
        need not be touched to decay."""
        self._score_LEA = np.zeros((num_layers, num_experts, len(decays)))
        self._hits_A = np.zeros(len(decays))
        self._num_steps = 0
        num_sampled = min(NUM_SAMPLED_LAYERS, num_layers) if len(decays) > 1 else 0
        self.shadows = {
            (2 * i + 1) * num_layers // (2 * num_sampled): ShadowCache(num_experts, len(decays))
            for i in range(num_sampled)
        }

    def make_order(self, *, num_slots: int, layers: range) -> EvictionOrder:
        for layer in layers:
            if layer in self.shadows:
                self.shadows[layer].num_slots = max(1, num_slots // len(layers))

        def scores() -> Scores:
            return self._score_LEA[layers.start : layers.stop, :, self.arm].reshape(-1)

        return ScoreOrder(scores, layers=layers, num_experts=self._score_LEA.shape[1])

    @property
    def hits(self) -> float:
        """Hits of the shadow caches under the best decay, recent steps counting most."""
        return float(self._hits_A.max())

    def use_shares(self, layer: int, arm: int | None = None) -> NDArray[np.float64]:
        """Returns `[E]`: the decayed share of past steps that used each expert, in [0, 1].

        Args:
            layer: The experts' layer.
            arm: Index of the decay; None: the one in use.
        """
        arm = self.arm if arm is None else arm
        decay = self.decays[arm]
        num_steps = max(1, self._num_steps)
        total = num_steps if decay == 1.0 else (1.0 - decay**num_steps) / (1.0 - decay)
        return self._score_LEA[layer, :, arm] / (self._weight_A[arm] * total)

    def begin_step(self, new_request: bool) -> None:  # noqa: ARG002
        self._num_steps += 1
        self._weight_A /= self._decay_A
        if self._weight_A.max() > LARGEST_WEIGHT:
            self._score_LEA /= self._weight_A
            self._weight_A[:] = 1.0

    def on_routed(self, layer: int, tokens_per_expert: Mapping[int, int]) -> None:
        score_EA = self._score_LEA[layer]
        most = max(tokens_per_expert.values(), default=1)
        for e, num_tokens in tokens_per_expert.items():
            share = num_tokens / most
            score_EA[e] += self._weight_A if share == 1.0 else share * self._weight_A
        shadow = self.shadows.get(layer)
        if shadow is not None:
            self._hits_A += shadow.serve(list(tokens_per_expert), score_EA)

    def end_step(self) -> None:
        best = int(self._hits_A.argmax())
        if self._hits_A[best] > self._hits_A[self.arm]:
            self.arm = best
        self._hits_A *= MEMORY


class ShadowCache:
    """The experts that one layer's share of the cache would hold under each decay."""

    def __init__(self, num_experts: int, num_arms: int):
        self.num_slots = num_experts
        self._resident_EA = np.zeros((num_experts, num_arms), dtype=bool)
        self._no_hits_A = np.zeros(num_arms, dtype=np.int64)
        # Distinct factors next to 1: equal scores must not make a shadow larger than its slots.
        self._tie_E1 = 1.0 - 1e-9 * np.arange(num_experts)[:, None]

    def serve(self, chosen_K: list[int], score_EA: Scores) -> NDArray[np.int64]:
        """Admits the chosen experts and evicts the lowest scores; returns `[A]` hits."""
        hits_A = self._resident_EA[chosen_K].sum(axis=0)
        if len(chosen_K) >= self.num_slots:
            # More than fits: the best of them stay, and the hits are no evidence of what to keep.
            key_EA = np.full_like(score_EA, -1.0)
            key_EA[chosen_K] = (score_EA * self._tie_E1)[chosen_K]
            self._keep(key_EA)
            return self._no_hits_A
        if hits_A.min() < len(chosen_K):
            key_EA = np.where(self._resident_EA, score_EA * self._tie_E1, -1.0)
            key_EA[chosen_K] = np.inf
            self._keep(key_EA)
        return hits_A

    def _keep(self, key_EA: Scores) -> None:
        """Keeps the `num_slots` highest keys of each arm that are not negative."""
        least_A = np.zeros(key_EA.shape[1])
        num_dropped = len(key_EA) - self.num_slots
        if num_dropped > 0:
            highest = np.partition(key_EA, num_dropped, axis=0)
            np.maximum(least_A, highest[num_dropped], out=least_A)
        np.greater_equal(key_EA, least_A, out=self._resident_EA)
