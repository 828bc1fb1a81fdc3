"""Policies that evict in order of recency: LRU, FIFO, and LRU with neighbours."""

from collections import OrderedDict
from collections.abc import Mapping

import numpy as np

from predictors.base import Ints
from runtime.policy.eviction.protocol import EvictionOrder, EvictionPolicy, Expert, IsEvictable
from runtime.policy.eviction.score_order import ScoreOrder, Scores


class RecencyOrder:
    """Least recently touched first; admissions, uses and predictions are touches."""

    def __init__(self) -> None:
        self._order: OrderedDict[Expert, None] = OrderedDict()

    def on_admit(self, expert: Expert) -> None:
        self._order[expert] = None

    def on_use(self, expert: Expert) -> None:
        self._order.move_to_end(expert)

    def on_prefetch(self, expert: Expert) -> None:
        """Records nothing: the admission was the touch."""

    def on_predict(self, expert: Expert) -> None:
        self.on_use(expert)

    def on_remove(self, expert: Expert) -> None:
        del self._order[expert]

    def clear(self) -> None:
        self._order.clear()

    def choose_victim(self, is_evictable: IsEvictable) -> Expert | None:
        for expert in self._order:
            if is_evictable(expert):
                return expert
        return None


class ArrivalOrder(RecencyOrder):
    """First admitted first; nothing else counts."""

    def on_use(self, expert: Expert) -> None:
        pass


class NeighbourOrder(RecencyOrder):
    """Least recently touched first; a touch also refreshes resident neighbours, just before it."""

    def on_admit(self, expert: Expert) -> None:
        self._order[expert] = None
        self.on_use(expert)

    def on_use(self, expert: Expert) -> None:
        layer, e = expert
        for neighbour in ((layer, e - 1), (layer, e + 1)):
            if neighbour in self._order:
                self._order.move_to_end(neighbour)
        self._order.move_to_end(expert)


class LruEviction(EvictionPolicy):
    """LRU for which a prediction is an access like a use (ProMoE, section 6.1)."""

    def make_order(self, *, num_slots: int, layers: range) -> EvictionOrder:  # noqa: ARG002
        return RecencyOrder()


class FifoEviction(EvictionPolicy):
    """First in, first out: one of the baselines in ProMoE's code."""

    def make_order(self, *, num_slots: int, layers: range) -> EvictionOrder:  # noqa: ARG002
        return ArrivalOrder()


class NeighbourEviction(EvictionPolicy):
    """LRU in which an expert's neighbours are kept as long as the expert itself.

    MoE-Infinity (sequence level), section 8.4, describes ZeRO-Infinity's cache as one "which
    enforces the neighbors of experts to be cached together", on top of LRU, and says no more; here
    the neighbours of an expert are those of the same layer whose ids differ by one.
    """

    def make_order(self, *, num_slots: int, layers: range) -> EvictionOrder:  # noqa: ARG002
        return NeighbourOrder()


class StalenessOrder(ScoreOrder):
    """Stale experts first, then by layer; ties go to the expert admitted first."""

    def __init__(self, policy: "LeastStaleEviction", *, layers: range, num_experts: int):
        super().__init__(self._compute_scores, layers=layers, num_experts=num_experts)
        self._policy = policy
        self._layer_N = np.repeat(np.arange(layers.start, layers.stop), num_experts)
        self._step_N = np.full(len(self._layer_N), -1)

    def _compute_scores(self) -> Scores:
        num_layers, layer_now = self._policy.num_layers, self._policy.layer_now
        layers_ahead_N = (self._layer_N - layer_now - 1) % num_layers
        is_current_N = self._step_N == self._policy.step
        return np.asarray(num_layers * is_current_N - layers_ahead_N, dtype=np.float64)

    def on_admit(self, expert: Expert) -> None:
        super().on_admit(expert)
        self.on_use(expert)

    def on_use(self, expert: Expert) -> None:
        self._step_N[self.index(expert)] = self._policy.step

    on_predict = on_use


class LeastStaleEviction(EvictionPolicy):
    """SpecMD (arXiv 2602.03921): experts are needed layer by layer, not by recency.

    An expert is stale when the current forward pass has neither used, fetched nor predicted it.
    Stale experts are evicted before current ones; within each group, experts of layers that the
    pass has completed come first, then the layers that are farthest ahead. The paper's pseudo-code
    was not available: this makes its description (current or stale, by position in the pass)
    precise.
    """

    def __init__(self, *, num_layers: int, num_experts: int):
        self.num_layers = num_layers
        self._num_experts = num_experts
        self.step = 0
        self.layer_now = -1
        """The last layer whose router has run in this step."""

    def make_order(self, *, num_slots: int, layers: range) -> EvictionOrder:  # noqa: ARG002
        return StalenessOrder(self, layers=layers, num_experts=self._num_experts)

    def begin_step(self, requests_T: Ints) -> None:  # noqa: ARG002
        self.step += 1
        self.layer_now = -1

    def on_routed(self, layer: int, tokens_per_expert: Mapping[int, int]) -> None:  # noqa: ARG002
        self.layer_now = layer
