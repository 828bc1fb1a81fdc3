"""Frequency that fades, as fast as has served best so far.

Shape suffixes: A arms (decays), L layers, E experts, K experts chosen in the step.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from predictors.errors import MoecastError
from runtime.policy.eviction.protocol import Eviction, EvictionPolicy
from runtime.policy.eviction.scored import Scored, Scores

DECAYS = (0.5, 0.8, 0.9, 0.95, 0.98, 1.0)
"""Factors per step. Up to .5 the order is LRU's; 1 is LFU."""

START = 3
"""Arm to begin with, before anything was measured: .95 served best in the first measurements."""

MEMORY = 0.99
"""Factor per step on the arms' past hits: about a hundred steps, so that a change is noticed."""


class DecayedLfu(EvictionPolicy):
    """The expert with the lowest `sum over its uses of decay ** (steps since)` goes.

    Every decay runs a shadow cache (ids only) of each layer's share of slots beside the real one,
    on the same routing; at each step's start the decay whose shadow has hit most, recent steps
    counting most, takes over the whole arena. All is deterministic. A global arena's shadows get
    an even share each, which is near enough to rank the decays. Why online: no fixed policy is safe
    across models (FlashMoE 2601.17063, "several decays as bandit arms" in antirez/ds4 636).
    """

    def __init__(self, *, num_layers: int, num_experts: int, decays: Sequence[float] = DECAYS):
        if not decays or not all(0.0 < decay <= 1.0 for decay in decays):
            raise MoecastError(f"decayed-lfu eviction: decays={list(decays)}: each in (0, 1]")
        self.decays = tuple(decays)
        self._decay_A1 = np.array(decays)[:, None]
        self._score_ALE = np.zeros((len(decays), num_layers, num_experts))
        self._shadow_LAE = np.zeros((num_layers, len(decays), num_experts), dtype=bool)
        self._hits_A = np.zeros(len(decays))
        self._step_hits_A = np.zeros(len(decays))
        self._share_L = np.zeros(num_layers, dtype=np.int64)
        self.arm = min(START, len(decays) - 1)

    def part(self, *, num_slots: int, layers: range) -> Eviction:
        self._share_L[layers.start : layers.stop] = max(1, num_slots // len(layers))

        def scores() -> Scores:
            return self._score_ALE[self.arm, layers.start : layers.stop].reshape(-1)

        return Scored(scores, layers=layers, num_experts=self._score_ALE.shape[2])

    def routed(self, layer: int, tokens_per_expert: Mapping[int, int]) -> None:
        chosen_K = list(tokens_per_expert)
        shadow_AE = self._shadow_LAE[layer]
        hits_A = shadow_AE[:, chosen_K].sum(axis=1)
        score_AE = self._score_ALE[:, layer]
        score_AE *= self._decay_A1
        score_AE[:, chosen_K] += 1.0
        share = int(self._share_L[layer])
        if len(chosen_K) < share:
            # A step that asks for more than fits says nothing about what to keep.
            self._step_hits_A += hits_A
        if hits_A.min() < len(chosen_K):
            self._admit(shadow_AE, score_AE, chosen_K, share)

    def _admit(
        self, shadow_AE: np.ndarray, score_AE: Scores, chosen_K: list[int], share: int
    ) -> None:
        """Each arm's shadow takes the chosen and keeps the best `share` of what it then holds."""
        key_AE = np.where(shadow_AE, score_AE, -1.0)
        key_AE[:, chosen_K] = np.inf
        if share < key_AE.shape[1]:
            dropped = np.argpartition(key_AE, -share, axis=1)[:, :-share]
            np.put_along_axis(key_AE, dropped, -1.0, axis=1)
        np.greater_equal(key_AE, 0.0, out=shadow_AE)

    def end_step(self) -> None:
        self._hits_A *= MEMORY
        self._hits_A += self._step_hits_A
        self._step_hits_A[:] = 0.0
        best = int(self._hits_A.argmax())
        if self._hits_A[best] > self._hits_A[self.arm]:
            self.arm = best
