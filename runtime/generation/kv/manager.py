"""Which layers' caches stay beside the computation, and what of the others is brought next."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from torch import Tensor

from runtime.errors import PlanError
from runtime.generation.kv.offload import OffloadTarget

WORKING_COPIES = 3
"""Caches of one layer that are beside the computation for a moment: what was, what is with the new
tokens, and the one that is being read for the next."""


class CacheLayer(Protocol):
    """A layer's cache, as the room knows it."""

    @property
    def final_bytes(self) -> int:
        """When its last token has come."""
        ...

    def read(self) -> tuple[Tensor, Tensor]:
        """What it has outside."""
        ...


class KVCacheManager:
    """Memory for the caches of a whole group.

    A layer of a batch is let in for good, with what it will grow to, or it stays outside and is
    read when its turn comes.

    Layers come round in the same order in every step, batch by batch. There the least recently
    used is the next to be used: a fixed set stays, and what follows the layer of now is known and
    read ahead.

    Args:
        budget_bytes: None: everything is let in.
        outside: makes a place for so many tokens; None: what has no room is refused.
    """

    def __init__(self, budget_bytes: int | None, outside: Callable[[int], OffloadTarget] | None):
        self.budget_bytes = budget_bytes
        self._outside = outside
        self._inside: dict[CacheLayer, int] = {}
        self._largest = 0
        self.num_read = 0
        self.peak_bytes = 0
        """At most let in and worked with at once."""
        self._next: dict[CacheLayer, CacheLayer] = {}
        """Who came after whom in the last step."""
        self._last: CacheLayer | None = None
        self._ahead: tuple[CacheLayer, Future[tuple[Tensor, Tensor]]] | None = None
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="moecast kv")

    @property
    def taken_bytes(self) -> int:
        """Of layers let in, when their last tokens have come."""
        return sum(self._inside.values())

    def lets_in(self, layer: CacheLayer) -> bool:
        """Whether the layer's cache may stay; once it may, it may until `leave`.

        Raises:
            PlanError: there is not even room to work with one layer, or no outside.
        """
        if layer in self._inside:
            return True
        size = layer.final_bytes
        self._largest = max(self._largest, size)
        working = WORKING_COPIES * self._largest
        if self.budget_bytes is None or self.taken_bytes + size + working <= self.budget_bytes:
            self._inside[layer] = size
            self.peak_bytes = max(self.peak_bytes, self.taken_bytes + working)
            return True
        if working > self.budget_bytes:
            raise PlanError(
                f"kv_budget of {self.budget_bytes} bytes is less than one layer's cache takes to "
                f"work with; the least is {working} bytes (kv_budget={working}), or a smaller "
                "batch_size"
            )
        if self._outside is None:
            raise PlanError(
                f"kv_budget of {self.budget_bytes} bytes is full and kv_offload=none: take a "
                "smaller n, a larger kv_budget, or kv_offload=disk"
            )
        self.peak_bytes = max(self.peak_bytes, self.taken_bytes + working)
        return False

    def outside(self, num_tokens: int) -> OffloadTarget:
        """A new place for so many tokens."""
        assert self._outside is not None
        return self._outside(num_tokens)

    def turn_of(self, layer: CacheLayer) -> None:
        """The layer's cache is used now; called for those inside as well."""
        if self._last is not None:
            self._next[self._last] = layer
        self._last = layer

    def read(self, layer: CacheLayer) -> tuple[Tensor, Tensor]:
        """What a layer has outside, read ahead or now."""
        self.num_read += 1
        if self._ahead is not None:
            ahead, future = self._ahead
            self._ahead = None
            if ahead is layer:
                return future.result()
            future.exception()  # another's, and its own affair when its turn comes
        return layer.read()

    def read_ahead(self, layer: CacheLayer) -> None:
        """The layer's turn is over, and what it appended is written: the next one's may be read."""
        follows = self._next.get(layer)
        is_outside = follows is not None and follows not in self._inside
        if is_outside and follows is not layer and self._ahead is None:
            assert follows is not None
            self._ahead = follows, self._reader.submit(follows.read)

    def leave(self, layer: CacheLayer) -> None:
        """Its batch is over."""
        if self._ahead is not None and self._ahead[0] is layer:
            self._ahead[1].exception()  # nobody is to read what is being closed
            self._ahead = None
        self._inside.pop(layer, None)
        before = [one for one, after in self._next.items() if after is layer]
        for one in before:
            del self._next[one]
        self._next.pop(layer, None)
        if self._last is layer:
            self._last = None

    def close(self) -> None:
        """Ends the reading thread."""
        self._reader.shutdown()
