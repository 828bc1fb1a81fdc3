"""Policies that evict by when experts were last used, or how often.

Shape suffixes: L layers, E experts.
"""

from collections.abc import Mapping

import numpy as np

from runtime.policy.eviction.base import Expert, Probabilities, ScoreEviction, ScoreOrder


class LruEviction(ScoreEviction):
    """LRU for which a prediction is an access like a use (ProMoE, section 6.1): no score decides.

    Ties go to the least recently touched expert, and all experts tie.
    """


class NeighbourOrder(ScoreOrder):
    """Least recently touched first; a touch also refreshes the neighbours, just before it."""

    def touch(self, expert: Expert) -> None:
        layer, e = expert
        for touched in (e - 1, e + 1, e):
            if 0 <= touched < self._num_experts:
                super().touch((layer, touched))


class NeighbourEviction(ScoreEviction):
    """LRU in which an expert's neighbours are kept as long as the expert itself.

    MoE-Infinity (sequence level), section 8.4, describes ZeRO-Infinity's cache as one "which
    enforces the neighbors of experts to be cached together", on top of LRU, and says no more; here
    the neighbours of an expert are those of the same layer whose ids differ by one.
    """

    order = NeighbourOrder


class ResettingOrder(ScoreOrder):
    """Lowest score first; the score of an evicted expert becomes 0."""

    def on_remove(self, expert: Expert) -> None:
        super().on_remove(expert)
        self.score_N[self.index(expert)] = 0.0


class LfuEviction(ScoreEviction):
    """Evicts the expert that the fewest steps since the start requested, resident or not.

    BrainStorm's policy: MoE-Infinity (request level), section 7.3, model-level counts. Ties go to
    the least recently touched expert.

    Args:
        num_layers: Layers of the model.
        num_experts: Experts of each layer.
        reset_on_eviction: An evicted expert's count starts again from 0, as in the LFU baseline of
            MoE-Infinity (sequence level), section 8.4.
    """

    def __init__(self, *, num_layers: int, num_experts: int, reset_on_eviction: bool = False):
        super().__init__(num_layers=num_layers, num_experts=num_experts)
        if reset_on_eviction:
            self.order = ResettingOrder

    def on_routed(self, layer: int, tokens_per_expert: Mapping[int, int]) -> None:
        self.score_LE[layer, list(tokens_per_expert)] += 1


class FmoeEviction(ScoreEviction):
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

    def make_order(self, *, num_slots: int, layers: range) -> ScoreOrder:  # noqa: ARG002
        return VisitOrder(self, layers)

    def set_visits(self, expert: Expert, visits: int | None) -> None:
        """Sets the visits of an expert; None: one more."""
        self._visits_LE[expert] = self._visits_LE[expert] + 1 if visits is None else visits
        self.score_LE[expert] = self._probability_LE[expert] * self._visits_LE[expert]

    def on_forecast(self, layer: int, probability_E: Probabilities, order_E: Probabilities) -> None:  # noqa: ARG002
        self._probability_LE[layer] = probability_E
        self.score_LE[layer] = self._probability_LE[layer] * self._visits_LE[layer]


class VisitOrder(ScoreOrder):
    """Lowest score first; counts the visits of experts while they are resident."""

    def __init__(self, policy: FmoeEviction, layers: range):
        super().__init__(policy.score_LE, layers)
        self._policy = policy

    def on_admit(self, expert: Expert) -> None:
        super().on_admit(expert)
        self._policy.set_visits(expert, 1)

    def on_use(self, expert: Expert) -> None:
        super().on_use(expert)
        self._policy.set_visits(expert, None)
