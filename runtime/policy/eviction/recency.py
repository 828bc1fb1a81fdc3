"""Policies that evict in order of recency: LRU, and LRU with neighbours."""

from collections import OrderedDict

from runtime.policy.eviction.protocol import EvictionOrder, EvictionPolicy, Expert, IsEvictable


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


class NeighbourEviction(EvictionPolicy):
    """LRU in which an expert's neighbours are kept as long as the expert itself.

    MoE-Infinity (sequence level), section 8.4, describes ZeRO-Infinity's cache as one "which
    enforces the neighbors of experts to be cached together", on top of LRU, and says no more; here
    the neighbours of an expert are those of the same layer whose ids differ by one.
    """

    def make_order(self, *, num_slots: int, layers: range) -> EvictionOrder:  # noqa: ARG002
        return NeighbourOrder()
