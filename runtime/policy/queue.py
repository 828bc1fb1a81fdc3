"""The transfer queue: experts that the link has to transfer, in two priorities."""

import heapq
import itertools

from runtime.policy.eviction.protocol import Expert


class TransferQueue:
    """Experts with chunks still to transfer: high in order of arrival, then low by priority.

    An expert is in the queue once: pushed high, it leaves the low side (a join, not a repeat).
    """

    def __init__(self) -> None:
        self._high: dict[Expert, None] = {}
        self._low: dict[Expert, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, Expert]] = []
        self._sequence = itertools.count()

    def __len__(self) -> int:
        return len(self._high) + len(self._low)

    def push_high(self, expert: Expert) -> None:
        """Adds an expert that a router has chosen, after those chosen earlier."""
        self._low.pop(expert, None)
        self._high.setdefault(expert)

    def push_low(self, expert: Expert, priority: float) -> None:
        """Adds a predicted expert; the smallest priority comes first, the last forecast counts."""
        if expert in self._high:
            return
        ticket = (priority, next(self._sequence))
        self._low[expert] = ticket
        heapq.heappush(self._heap, (*ticket, expert))

    def remove(self, expert: Expert) -> None:
        self._high.pop(expert, None)
        self._low.pop(expert, None)

    def clear(self) -> None:
        self._high.clear()
        self._low.clear()
        self._heap.clear()

    def remove_low_of_layer(
        self, layer: int, *, keep: frozenset[int] = frozenset()
    ) -> list[Expert]:
        """Removes a layer's low-priority experts (ProMoE, algorithm 2, line 12), but `keep`."""
        removed = [expert for expert in self._low if expert[0] == layer and expert[1] not in keep]
        for expert in removed:
            del self._low[expert]
        return removed

    def is_high(self, expert: Expert) -> bool:
        return expert in self._high

    def is_low(self, expert: Expert) -> bool:
        return expert in self._low

    def priority(self, expert: Expert) -> float:
        return self._low[expert][0]

    def high(self) -> list[Expert]:
        """Returns the high-priority experts in transfer order."""
        return list(self._high)

    def low(self) -> list[Expert]:
        """Returns the low-priority experts in transfer order; drops stale heap items."""
        live = [item for item in self._heap if self._low.get(item[2]) == (item[0], item[1])]
        if len(live) < len(self._heap):
            self._heap = live
            heapq.heapify(self._heap)
        return [item[2] for item in sorted(live)]

    def first_low(self) -> Expert | None:
        while self._heap:
            priority, ticket, expert = self._heap[0]
            if self._low.get(expert) == (priority, ticket):
                return expert
            heapq.heappop(self._heap)
        return None
