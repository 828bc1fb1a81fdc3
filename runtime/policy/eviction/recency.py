"""Policies that evict in order of recency: LRU, and LRU with neighbours."""

from runtime.policy.eviction.protocol import Expert
from runtime.policy.eviction.score_order import ScoreEviction, ScoreOrder


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
