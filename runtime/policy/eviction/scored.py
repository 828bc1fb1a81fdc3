"""The part that every policy with a score per expert shares.

Shape suffixes: L layers, E experts, N = experts of the part's layers, layer by layer.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from runtime.policy.eviction.protocol import Evictable, Expert

Scores = NDArray[np.float64]

KEEP = 1e300
"""A score above every other: dropped only when nothing else may be. Finite, unlike no score."""

FEW = 4
"""Candidates looked for one by one; only a prefill pins so many that sorting all is cheaper."""


class Scored:
    """Drops the resident expert of the lowest score; ties go to the one touched longest ago.

    Scores are finite and belong to the policy, which changes them in place as it learns; looking
    for a victim is a handful of numpy calls over N, with no Python loop over residents.
    """

    def __init__(self, scores: Callable[[], Scores], *, layers: range, num_experts: int):
        """`scores() -> [N]`, not to be written to."""
        self._scores = scores
        self._num_experts = num_experts
        self._first_layer = layers.start
        size = len(layers) * num_experts
        self._absent_N = np.full(size, np.inf)
        """0 where the expert is resident: added to the scores, it leaves only residents."""
        self._touched_N = np.zeros(size, dtype=np.int64)
        self._clock = 0

    def place(self, expert: Expert) -> int:
        """Where the expert stands in `[N]`."""
        return (expert[0] - self._first_layer) * self._num_experts + expert[1]

    def touch(self, expert: Expert) -> None:
        """The expert goes last among those of its score."""
        self._clock += 1
        self._touched_N[self.place(expert)] = self._clock

    def admitted(self, expert: Expert) -> None:
        self._absent_N[self.place(expert)] = 0.0
        self.touch(expert)

    def used(self, expert: Expert) -> None:
        self.touch(expert)

    def predicted(self, expert: Expert) -> None:
        self.touch(expert)

    def removed(self, expert: Expert) -> None:
        self._absent_N[self.place(expert)] = np.inf

    def victim(self, evictable: Evictable) -> Expert | None:
        score_N = self._scores() + self._absent_N
        for _ in range(FEW):
            place = self._lowest(score_N)
            if place is None:
                return None
            expert = self._expert(place)
            if evictable(expert):
                return expert
            score_N[place] = np.inf
        for place in np.lexsort((self._touched_N, score_N)).tolist():
            if score_N[place] == np.inf:
                return None
            expert = self._expert(place)
            if evictable(expert):
                return expert
        return None

    def _expert(self, place: int) -> Expert:
        layer, expert = divmod(place, self._num_experts)
        return self._first_layer + layer, expert

    def _lowest(self, score_N: Scores) -> int | None:
        place = int(score_N.argmin())
        lowest = score_N[place]
        if lowest == np.inf:
            return None
        ties = (score_N == lowest).nonzero()[0]
        if len(ties) > 1:
            place = int(ties[self._touched_N[ties].argmin()])
        return place


def of_layers(score_LE: Scores, layers: range) -> Callable[[], Scores]:
    """The scores of some layers' experts as `[N]`: a view, so that it follows the matrix."""
    score_N = score_LE[layers.start : layers.stop].reshape(-1)
    assert np.shares_memory(score_N, score_LE)
    return lambda: score_N
