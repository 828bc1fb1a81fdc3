# cython: boundscheck=False, wraparound=False
"""The interface between a cache and its eviction policy, and how policies choose by scores.

Shape suffixes: L layers, E experts, N = all experts, layer by layer, P partitions.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from predictors.base import Ints
from runtime.compiled import is_compiled

Expert = tuple[int, int]
"""(layer, expert)"""

Probabilities = Sequence[float] | NDArray[np.floating]
"""`[E]`: a number for each expert of a layer."""

IsEvictable = Callable[[Expert], bool]
"""Whether a resident expert may be evicted now: not pinned, not in flight."""

Scores = NDArray[np.float64]

PROTECTED = 1e300
"""A score above all others: evicted only when nothing else may be. Scores must be finite."""

COMPILED = is_compiled()
"""Whether to loop over experts, as C does best, or to call numpy: both find the same expert."""

NUM_SINGLE_TRIES = 4
"""Victims looked up one by one. Sorting is cheaper only while a prefill pins most experts."""


class EvictionPolicy:
    """Evicts the resident expert with the lowest score; ties go to the least recently touched one.

    Subclasses change the scores in place, at the events of a step. They see each event once:
    `begin_step`, then `on_routed` for each layer with forecasts in between, then `end_step`.
    `on_routed` comes before `on_use` and `on_admit` of the same layer. Finding a victim takes a few
    numpy calls over the experts of a partition and no Python loop over residents.

    Shape suffixes: T tokens of the step, K top_k.
    """

    def __init__(self, *, num_layers: int, num_experts: int):
        self._num_layers, self._num_experts = num_layers, num_experts
        self.score_LE = np.zeros((num_layers, num_experts))
        """The scores, which must be finite."""
        self.score_N = self.score_LE.reshape(-1)
        """A view of them."""
        self._size = size = len(self.score_N)
        self.partitions: list[tuple[int, range]] = []
        """Slots of each partition, and the layers whose experts share them."""
        self._partition_L = [0] * num_layers
        """Number of each layer's partition."""
        self._start_P = [0, size]
        """Index of each partition's first expert; the next one's is where its experts end."""
        self._absent_N = np.full(size, np.inf)
        """0 for residents, infinity for others: added to the scores, it leaves only residents."""
        self._masked_N = np.empty(size)
        """Scores of residents, infinity for others; where compiled, of `_residents_N`: a buffer."""
        self._residents_N = np.zeros(size, dtype=np.int64)
        """Where compiled: from the start of each partition on, the indices of its residents, in any
        order."""
        self._num_residents_P = np.zeros(num_layers, dtype=np.int64)
        """Where compiled: how many these are."""
        self._places_N = np.full(size, -1, dtype=np.int64)
        """Where compiled: the place of each resident in `_residents_N`, -1 for others."""
        self._touched_N = np.zeros(size, dtype=np.int64)
        self._clock = 0

    def divide(self, partitions: Sequence[tuple[int, range]]) -> None:
        """Begins with an empty cache: slots of each partition, and the layers that share them."""
        self.partitions = list(partitions)
        self._partition_L = [p for p, (_, layers) in enumerate(partitions) for _ in layers]
        self._start_P = [0, *(layers.stop * self._num_experts for _, layers in partitions)]
        self.clear()

    # ---- events of a step

    def begin_step(self, requests_T: Ints) -> None:
        """Starts a forward pass.

        Args:
            requests_T: The request of each token. An id that was not seen before begins a request;
                its end is not signalled (`predictors.requests.LiveRequests`).
        """

    def on_tokens_routed(self, layer: int, experts_TK: Ints) -> None:
        """Records the experts of each token, in the order of `requests_T`.

        It comes just before `on_routed` of the same layer, whose `tokens_per_expert` is the sum
        over all tokens and, where several devices share the experts, holds this device's only. A
        layer whose router is not observed has no such event. The id E stands for no choice.
        """

    def on_routed(self, layer: int, tokens_per_expert: Mapping[int, int]) -> None:
        """Records the experts that the layer's router has chosen and their numbers of tokens."""

    def on_forecast(self, layer: int, probability_E: Probabilities, order_E: Probabilities) -> None:
        """Records a forecast.

        Args:
            layer: Its target.
            probability_E: The probability of each expert that some token needs it.
            order_E: What prefetches are ordered by (`Forecast.order_E`).
        """

    def on_reuse_scores(self, layer: int, score_1E: Probabilities) -> None:
        """Records predictions of the experts' use by the coming tokens.

        They come just before `on_routed` of the same layer, or after it if nothing had to be
        evicted for what it chose: one row, from `predictors.reuse`.
        """

    def end_step(self) -> None:
        """Ends the forward pass."""

    def may_evict_for(self, victim: Expert, newcomer: Expert) -> bool:  # noqa: ARG002
        """Returns whether `victim` may be evicted for a prefetch of `newcomer`.

        If not, the prefetch waits. Requests of routers never wait.
        """
        return True

    def next_idle_candidate(self) -> Expert | None:
        """Returns the missing expert with the highest score, for an idle link to fetch.

        None if there is none or the policy has no such scores.
        """
        return None

    def is_permanent(self, expert: Expert) -> bool:  # noqa: ARG002
        """Returns whether the expert stays where a system evicts experts after their use."""
        return False

    # ---- residents

    def scores(self) -> Scores:
        """Returns the scores `[N]`, up to date; they are not written to."""
        return self.score_N

    def _index(self, expert: Expert) -> int:
        index: int = expert[0] * self._num_experts + expert[1]
        assert 0 <= index < self._size, expert  # compiled code does not check it
        return index

    def touch(self, expert: Expert) -> None:
        """Makes the expert the last among those of its score."""
        self._clock += 1
        layer, e = expert
        self._touched_N[layer * self._num_experts + e] = self._clock

    def on_admit(self, expert: Expert) -> None:
        """Records that the expert got a slot, for a prediction or a router's request."""
        index = self._index(expert)
        self._absent_N[index] = 0.0
        if COMPILED and self._places_N[index] < 0:
            partition = self._partition_L[expert[0]]
            place = self._start_P[partition] + self._num_residents_P[partition]
            self._residents_N[place] = index
            self._places_N[index] = place
            self._num_residents_P[partition] += 1
        self.touch(expert)

    def on_prefetch(self, expert: Expert) -> None:
        """Records that the expert just admitted was forecast: the admission was the touch."""

    def on_use(self, expert: Expert) -> None:
        """Records that its router requested the resident expert."""
        self.touch(expert)

    def on_predict(self, expert: Expert) -> None:
        """Records that a forecast named the resident expert."""
        self.touch(expert)

    def on_remove(self, expert: Expert) -> None:
        """Records that the expert lost its slot, for whatever reason."""
        index = self._index(expert)
        self._absent_N[index] = np.inf
        if COMPILED and self._places_N[index] >= 0:
            partition = self._partition_L[expert[0]]
            self._num_residents_P[partition] -= 1
            end = self._start_P[partition] + self._num_residents_P[partition]
            last, place = self._residents_N[end], self._places_N[index]
            self._residents_N[place], self._places_N[last] = last, place
            self._places_N[index] = -1

    def clear(self) -> None:
        """Forgets all experts, before those that are resident are admitted again."""
        self._absent_N[:] = np.inf
        self._places_N[:] = -1
        self._num_residents_P[:] = 0

    def choose_victim(self, layer: int, is_evictable: IsEvictable) -> Expert | None:
        """Returns the resident to evict for an expert of the layer; None: none is evictable."""
        score_N, partition = self.scores(), self._partition_L[layer]
        start, stop = self._start_P[partition], self._start_P[partition + 1]
        end = self._mask(score_N, partition)
        for _ in range(NUM_SINGLE_TRIES):
            index = self._take_lowest(start, end)
            if index < 0:
                return None
            expert = divmod(index, self._num_experts)
            if is_evictable(expert):
                return expert
        masked_N = (score_N + np.asarray(self._absent_N))[start:stop]
        for index in np.lexsort((self._touched_N[start:stop], masked_N)).tolist():
            if masked_N[index] == np.inf:
                return None
            expert = divmod(start + index, self._num_experts)
            if is_evictable(expert):
                return expert
        return None

    def find_best_absent(self, score_LE: Scores, least: float) -> Expert | None:
        """Returns the absent expert with the highest score above `least`; None: there is none.

        The scores need not be those of eviction.
        """
        score_N, partitions = score_LE.reshape(-1), range(len(self.partitions))
        best = [self._highest_absent(score_N, partition, least) for partition in partitions]
        score, expert = max(best, default=(least, None))
        return expert if score > least else None

    def _highest_absent(
        self, score_N: Scores, partition: int, least: float
    ) -> tuple[float, Expert]:
        """Returns the highest score of an absent expert, and which; `least` if all are resident."""
        start, stop = self._start_P[partition], self._start_P[partition + 1]
        if COMPILED:
            index, highest = start, least
            for i in range(start, stop):
                if score_N[i] > highest and self._absent_N[i] > 0.0:
                    index, highest = i, score_N[i]
            return highest, divmod(index, self._num_experts)
        is_absent_N = np.asarray(self._absent_N)[start:stop] > 0.0
        absent_score_N = np.where(is_absent_N, score_N[start:stop], least)
        index = int(absent_score_N.argmax())
        return float(absent_score_N[index]), divmod(start + index, self._num_experts)

    def _mask(self, score_N: Scores, partition: int) -> int:
        """Sets the scores of a partition's residents; returns where they end."""
        start, stop = self._start_P[partition], self._start_P[partition + 1]
        assert len(score_N) == self._size, (len(score_N), self._size)  # loops do not check it
        if not COMPILED:
            masked_N = self._masked_N[start:stop]
            np.add(score_N[start:stop], self._absent_N[start:stop], out=masked_N)
            return stop
        end: int = start + self._num_residents_P[partition]
        for place in range(start, end):
            self._masked_N[place] = score_N[self._residents_N[place]]
        return end

    def _take_lowest(self, start: int, end: int) -> int:
        """Returns the index of the next victim, whose score becomes infinite; -1: there is none."""
        if COMPILED:
            best, least = -1, np.inf
            for place in range(start, end):
                score = self._masked_N[place]
                if score < least or (
                    score == least
                    and best >= 0
                    and self._touched_N[self._residents_N[place]]
                    < self._touched_N[self._residents_N[best]]
                ):
                    best, least = place, score
            if best < 0:
                return -1
            self._masked_N[best] = np.inf
            return self._residents_N[best]
        # A second search for the lowest score is cheaper than comparing all scores with it.
        score_N = np.asarray(self._masked_N)[start:end]
        touched_N = np.asarray(self._touched_N)[start:end]
        index = int(score_N.argmin())
        lowest = score_N[index]
        if lowest == np.inf:
            return -1
        score_N[index] = np.inf
        if score_N[score_N.argmin()] == lowest:
            score_N[index] = lowest
            ties = (score_N == lowest).nonzero()[0]
            index = int(ties[touched_N[ties].argmin()])
            score_N[index] = np.inf
        return start + index


def copy_scores(score_E: Scores, target_E: Scores) -> None:
    """Copies scores into an array or a part of one."""
    target_E[:] = score_E


def view_scores(score_LE: Scores, layers: range) -> Scores:
    """Returns some layers' scores as `[N]`: a view of the matrix."""
    score_N = score_LE[layers.start : layers.stop].reshape(-1)
    assert np.shares_memory(score_N, score_LE)
    return score_N
