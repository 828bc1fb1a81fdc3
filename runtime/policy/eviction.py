"""Which expert to drop when a slot is needed: the choices, each over integers only."""

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Protocol

from predictors.errors import MoecastError, unknown

Expert = tuple[int, int]
"""(layer, expert)"""


class Eviction(Protocol):
    """Bookkeeping of one arena, or of one layer's share of it."""

    def touched(self, expert: Expert) -> None:
        """The expert was asked for, predicted or admitted."""

    def removed(self, expert: Expert) -> None:
        """The expert has left the arena."""

    def victim(self, evictable: Callable[[Expert], bool]) -> Expert | None:
        """The resident expert to drop next, or None when none may be dropped."""


class Lru:
    """Least recently used first: promoe 6.1, with predictions counting as use."""

    def __init__(self) -> None:
        self._order: OrderedDict[Expert, None] = OrderedDict()

    def touched(self, expert: Expert) -> None:
        self._order[expert] = None
        self._order.move_to_end(expert)

    def removed(self, expert: Expert) -> None:
        del self._order[expert]

    def victim(self, evictable: Callable[[Expert], bool]) -> Expert | None:
        return next((expert for expert in self._order if evictable(expert)), None)


class Lfu:
    """Least often used first, counted since the start; ties go to the least recently used."""

    def __init__(self) -> None:
        self._uses: Counter[Expert] = Counter()
        self._order: OrderedDict[Expert, None] = OrderedDict()

    def touched(self, expert: Expert) -> None:
        self._uses[expert] += 1
        self._order[expert] = None
        self._order.move_to_end(expert)

    def removed(self, expert: Expert) -> None:
        del self._order[expert]

    def victim(self, evictable: Callable[[Expert], bool]) -> Expert | None:
        candidates = [expert for expert in self._order if evictable(expert)]
        return min(candidates, key=self._uses.__getitem__, default=None)


class Fifo:
    """First admitted first."""

    def __init__(self) -> None:
        self._order: dict[Expert, None] = {}

    def touched(self, expert: Expert) -> None:
        self._order.setdefault(expert)

    def removed(self, expert: Expert) -> None:
        del self._order[expert]

    def victim(self, evictable: Callable[[Expert], bool]) -> Expert | None:
        return next((expert for expert in self._order if evictable(expert)), None)


EVICTIONS: dict[str, Callable[[], Eviction]] = {"lru": Lru, "lfu": Lfu, "fifo": Fifo}


def eviction(name: str) -> Callable[[], Eviction]:
    """The constructor of a policy, by name."""
    if name not in EVICTIONS:
        raise MoecastError(unknown("eviction policy", name, EVICTIONS))
    return EVICTIONS[name]
