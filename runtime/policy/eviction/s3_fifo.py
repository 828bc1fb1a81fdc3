"""S3-FIFO: three first-in-first-out queues, of which a small one filters what is used once."""

from collections import OrderedDict

from runtime.policy.eviction.protocol import EvictionOrder, EvictionPolicy, Expert, IsEvictable

SMALL_SHARE = 0.1
"""Share of the slots that the small queue may hold before its experts are evicted first."""

MOST_USES = 3
"""Uses are counted up to this number (two bits)."""


class S3FifoOrder:
    """The small, main and ghost queues of one partition (Yang et al., SOSP 2023, algorithm 1).

    A new expert enters the small queue, or the main one if it was evicted from the small queue
    lately. An expert of the small queue that is used twice moves to the main queue; one of the main
    queue that was used since goes round once more for each use.
    """

    def __init__(self, num_slots: int) -> None:
        self._small_slots = max(1, round(SMALL_SHARE * num_slots))
        self._ghost_slots = max(1, num_slots - self._small_slots)
        self._small: OrderedDict[Expert, int] = OrderedDict()
        """Uses of each resident expert since it was admitted, in order of admission."""
        self._main: OrderedDict[Expert, int] = OrderedDict()
        self._ghost: OrderedDict[Expert, None] = OrderedDict()

    def on_admit(self, expert: Expert) -> None:
        queue = self._small
        if expert in self._ghost:
            del self._ghost[expert]
            queue = self._main
        queue[expert] = 0

    def on_use(self, expert: Expert) -> None:
        queue = self._small if expert in self._small else self._main
        queue[expert] = min(MOST_USES, queue[expert] + 1)

    def on_prefetch(self, expert: Expert) -> None:
        """Records nothing: only uses count."""

    def on_predict(self, expert: Expert) -> None:
        """Records nothing: only uses count."""

    def on_remove(self, expert: Expert) -> None:
        if self._main.pop(expert, None) is not None:
            return
        del self._small[expert]
        self._ghost[expert] = None
        if len(self._ghost) > self._ghost_slots:
            self._ghost.popitem(last=False)

    def clear(self) -> None:
        self._small.clear()
        self._main.clear()

    def choose_victim(self, is_evictable: IsEvictable) -> Expert | None:
        if len(self._small) >= self._small_slots or not self._main:
            victim = self._choose_from_small(is_evictable) or self._choose_from_main(is_evictable)
        else:
            victim = self._choose_from_main(is_evictable) or self._choose_from_small(is_evictable)
        return victim

    def _choose_from_small(self, is_evictable: IsEvictable) -> Expert | None:
        for expert, uses in list(self._small.items()):
            if uses > 1:
                del self._small[expert]
                self._main[expert] = 0
            elif is_evictable(expert):
                return expert
        return None

    def _choose_from_main(self, is_evictable: IsEvictable) -> Expert | None:
        # Every round lowers the counts, so that after MOST_USES rounds each expert is a candidate.
        for _ in range(MOST_USES + 1):
            for expert, uses in list(self._main.items()):
                if not is_evictable(expert):
                    continue
                if uses == 0:
                    return expert
                self._main[expert] = uses - 1
                self._main.move_to_end(expert)
        return None


class S3FifoEviction(EvictionPolicy):
    """S3-FIFO (Yang et al., SOSP 2023): evicts what is used once before what is used again."""

    def make_order(self, *, num_slots: int, layers: range) -> EvictionOrder:  # noqa: ARG002
        return S3FifoOrder(num_slots)
