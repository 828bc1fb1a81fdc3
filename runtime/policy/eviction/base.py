# cython: boundscheck=False, wraparound=False
"""The interface between a cache and its eviction policy, and the order that policies use.

Shape suffixes: L layers, E experts, N = experts of the partition's layers, layer by layer.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

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
    """Makes the orders of a cache's partitions and keeps what they share.

    It sees each event of a step once: `begin_step`, then `on_routed` for each layer with forecasts
    in between, then `end_step`. `on_routed` comes before `on_use` and `on_admit` of the same layer.

    Shape suffixes: T tokens of the step, K top_k, E experts.
    """

    def make_order(self, *, num_slots: int, layers: range) -> "ScoreOrder":
        """Makes the order of `num_slots` slots that the experts of `layers` share."""
        raise NotImplementedError

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


class ScoreOrder:
    """Lowest score first; ties go to the least recently touched expert.

    Scores are finite and belong to the policy, which changes them in place. Finding a victim takes
    a few numpy calls over N and no Python loop over residents.

    Args:
        score_LE: The scores of all layers.
        layers: Layers of the partition.
    """

    def __init__(self, score_LE: Scores, layers: range):
        self.score_N = view_scores(score_LE, layers)
        self._num_experts = score_LE.shape[1]
        self._first_layer = layers.start
        self._size = size = len(self.score_N)
        self._absent_N = np.full(size, np.inf)
        """0 for residents, infinity for others: added to the scores, it leaves only residents."""
        self._masked_N = np.empty(size)
        """Scores of residents, infinity for others; where compiled, of `_residents_N`: a buffer."""
        self._residents_N = np.zeros(size, dtype=np.int64)
        """Where compiled: the indices of residents, `_num_residents` of them, in any order."""
        self._places_N = np.full(size, -1, dtype=np.int64)
        """Where compiled: the place of each resident in `_residents_N`, -1 for others."""
        self._num_residents = 0
        self._touched_N = np.zeros(size, dtype=np.int64)
        self._clock = 0

    def scores(self) -> Scores:
        """Returns `[N]`, up to date; it is not written to."""
        return self.score_N

    def index(self, expert: Expert) -> int:
        index: int = (expert[0] - self._first_layer) * self._num_experts + expert[1]
        assert 0 <= index < self._size, expert  # compiled code does not check it
        return index

    def touch(self, expert: Expert) -> None:
        """Makes the expert the last among those of its score."""
        self._clock += 1
        layer, e = expert
        self._touched_N[(layer - self._first_layer) * self._num_experts + e] = self._clock

    def on_admit(self, expert: Expert) -> None:
        """Records that the expert got a slot, for a prediction or a router's request."""
        index = self.index(expert)
        self._absent_N[index] = 0.0
        if COMPILED and self._places_N[index] < 0:
            self._residents_N[self._num_residents] = index
            self._places_N[index] = self._num_residents
            self._num_residents += 1
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
        index = self.index(expert)
        self._absent_N[index] = np.inf
        if COMPILED and self._places_N[index] >= 0:
            self._num_residents -= 1
            last, place = self._residents_N[self._num_residents], self._places_N[index]
            self._residents_N[place], self._places_N[last] = last, place
            self._places_N[index] = -1

    def clear(self) -> None:
        """Forgets all experts, before those that are resident are admitted again."""
        self._absent_N[:] = np.inf
        self._places_N[:] = -1
        self._num_residents = 0

    def choose_victim(self, is_evictable: IsEvictable) -> Expert | None:
        """Returns the resident expert to evict next, or None when none is evictable."""
        score_N = self.scores()
        self._mask(score_N)
        for _ in range(NUM_SINGLE_TRIES):
            index = self._take_lowest()
            if index < 0:
                return None
            expert = self._expert(index)
            if is_evictable(expert):
                return expert
        masked_N = score_N + np.asarray(self._absent_N)
        for index in np.lexsort((self._touched_N, masked_N)).tolist():
            if masked_N[index] == np.inf:
                return None
            expert = self._expert(index)
            if is_evictable(expert):
                return expert
        return None

    def highest_absent(self, score_N: Scores, least: float) -> tuple[float, Expert]:
        """Returns the highest score of an absent expert, and which; `least` if all are resident."""
        assert len(score_N) == self._size, (len(score_N), self._size)
        if COMPILED:
            index, highest = 0, least
            for i in range(self._size):
                if score_N[i] > highest and self._absent_N[i] > 0.0:
                    index, highest = i, score_N[i]
            return highest, self._expert(index)
        absent_score_N = np.where(np.asarray(self._absent_N) > 0.0, score_N, least)
        index = int(absent_score_N.argmax())
        return float(absent_score_N[index]), self._expert(index)

    def _expert(self, index: int) -> Expert:
        layer, e = divmod(index, self._num_experts)
        return self._first_layer + layer, e

    def _mask(self, score_N: Scores) -> None:
        """Sets the scores of residents."""
        assert len(score_N) == self._size, (len(score_N), self._size)  # loops do not check it
        if COMPILED:
            for place in range(self._num_residents):
                self._masked_N[place] = score_N[self._residents_N[place]]
        else:
            np.add(score_N, self._absent_N, out=self._masked_N)

    def _take_lowest(self) -> int:
        """Returns the index of the next victim, whose score becomes infinite; -1: there is none."""
        if COMPILED:
            best, least = -1, np.inf
            for place in range(self._num_residents):
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
        score_N, touched_N = np.asarray(self._masked_N), np.asarray(self._touched_N)
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
        return index


class ScoreEviction(EvictionPolicy):
    """Evicts the expert with the lowest score; subclasses change the scores at a step's events."""

    order = ScoreOrder

    def __init__(self, *, num_layers: int, num_experts: int):
        self.score_LE = np.zeros((num_layers, num_experts))

    def make_order(self, *, num_slots: int, layers: range) -> ScoreOrder:  # noqa: ARG002
        return self.order(self.score_LE, layers)


def copy_scores(score_E: Scores, target_E: Scores) -> None:
    """Copies scores into an array or a part of one."""
    target_E[:] = score_E


def view_scores(score_LE: Scores, layers: range) -> Scores:
    """Returns some layers' scores as `[N]`: a view of the matrix."""
    score_N = score_LE[layers.start : layers.stop].reshape(-1)
    assert np.shares_memory(score_N, score_LE)
    return score_N


def find_best_absent(orders: Iterable[tuple[ScoreOrder, Scores]], least: float) -> Expert | None:
    """Returns the absent expert with the highest score above `least`; None: there is none.

    Args:
        orders: Each partition's order and `[N]` scores, which need not be those of eviction.
        least: A score.
    """
    best = [order.highest_absent(score_N, least) for order, score_N in orders]
    score, expert = max(best, default=(least, None))
    return expert if score > least else None
