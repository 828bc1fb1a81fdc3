"""Policies that evict by when experts were last used, or how often.

Shape suffixes: L layers, E experts.
"""

from collections.abc import Mapping

import numpy as np

from runtime.policy.eviction.base import EvictionPolicy, Expert, Probabilities


class LruEviction(EvictionPolicy):
    """LRU for which a prediction is an access like a use (ProMoE, section 6.1): no score decides.

    Ties go to the least recently touched expert, and all experts tie.
    """


class NeighbourEviction(EvictionPolicy):
    """LRU in which an expert's neighbours are kept as long as the expert itself.

    MoE-Infinity (sequence level), section 8.4, describes ZeRO-Infinity's cache as one "which
    enforces the neighbors of experts to be cached together", on top of LRU, and says no more; here
    the neighbours of an expert are those of the same layer whose ids differ by one. A touch
    refreshes them just before the expert itself.
    """

    def touch(self, expert: Expert) -> None:
        layer, e = expert
        for touched in (e - 1, e + 1, e):
            if 0 <= touched < self._num_experts:
                super().touch((layer, touched))


class LfuEviction(EvictionPolicy):
    """Evicts the expert that the fewest steps since the start requested, resident or not.

    BrainStorm's policy: MoE-Infinity (request level), section 7.3, model-level counts. Ties go to
    the least recently touched expert.
    """

    def on_routed(self, layer: int, tokens_per_expert: Mapping[int, int]) -> None:
        self.score_LE[layer, list(tokens_per_expert)] += 1


class ResettingLfuEviction(LfuEviction):
    """LFU in which an evicted expert's count starts again from 0.

    The LFU baseline of MoE-Infinity (sequence level), section 8.4.
    """

    def on_remove(self, expert: Expert) -> None:
        super().on_remove(expert)
        self.score_LE[expert] = 0.0


def make_lfu(*, reset_on_eviction: bool = False, **shape: int) -> LfuEviction:
    """Makes an LFU policy for a model of this shape."""
    return ResettingLfuEviction(**shape) if reset_on_eviction else LfuEviction(**shape)


class FmoeEviction(EvictionPolicy):
    """Evicts the expert with the highest `1 / (p * freq)` (fMoE, section 4.5).

    `p` is the latest forecast of the expert (in fMoE: the expert map's that the search found), 1
    before any. `freq`, the "cache visit frequency", counts the steps that requested the expert
    since it was fetched; the fetch counts as one, so that a prefetched expert is not the next to
    be evicted. Ties go to the least recently touched expert.
    """

    def __init__(self, *, num_layers: int, num_experts: int):
        super().__init__(num_layers=num_layers, num_experts=num_experts)
        self._probability_LE = np.ones((num_layers, num_experts))
        self._visits_LE = np.zeros((num_layers, num_experts))

    def on_admit(self, expert: Expert) -> None:
        super().on_admit(expert)
        self._set_visits(expert, 1)

    def on_use(self, expert: Expert) -> None:
        super().on_use(expert)
        self._set_visits(expert, self._visits_LE[expert] + 1)

    def _set_visits(self, expert: Expert, visits: float) -> None:
        self._visits_LE[expert] = visits
        self.score_LE[expert] = self._probability_LE[expert] * visits

    def on_forecast(self, layer: int, probability_E: Probabilities, order_E: Probabilities) -> None:  # noqa: ARG002
        self._probability_LE[layer] = probability_E
        self.score_LE[layer] = self._probability_LE[layer] * self._visits_LE[layer]
