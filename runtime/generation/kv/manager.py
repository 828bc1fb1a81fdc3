"""The KV-cache manager: which cache layers stay in memory, and which is read next."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from torch import Tensor

from runtime.errors import PlanError
from runtime.generation.kv.offload import OffloadTarget

WORKING_COPIES = 3
"""Copies of one cache layer in memory at once: the old one, the one with new tokens, and the one
being read for the next layer."""


class CacheLayer(Protocol):
    """One layer of one batch's KV cache, as the manager sees it."""

    @property
    def final_bytes(self) -> int:
        """Bytes at its final length."""
        ...

    def read(self) -> tuple[Tensor, Tensor]:
        """Read its offloaded keys and values."""
        ...


class KVCacheManager:
    """Memory for the KV caches of a whole group.

    A cache layer is admitted for good, with the bytes that it will grow to, or it is offloaded and
    read whenever it is used.

    Layers are used in the same order in every step, batch by batch. The least recently used layer
    is therefore the next to be used: a fixed set stays in memory, and the layer after the current
    one is known and read ahead.

    Args:
        budget_bytes: None admits every layer.
        outside: makes an offload target for a number of tokens; None refuses to offload.
    """

    def __init__(self, budget_bytes: int | None, outside: Callable[[int], OffloadTarget] | None):
        self.budget_bytes = budget_bytes
        self._outside = outside
        self._admitted: dict[CacheLayer, int] = {}
        self._largest = 0
        self.num_read = 0
        self.peak_bytes = 0
        """Most bytes admitted and in use at once."""
        self._next: dict[CacheLayer, CacheLayer] = {}
        """The layer used after each layer in the last step."""
        self._last: CacheLayer | None = None
        self._ahead: tuple[CacheLayer, Future[tuple[Tensor, Tensor]]] | None = None
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="moecast kv")

    @property
    def admitted_bytes(self) -> int:
        """Bytes of the admitted layers at their final lengths."""
        return sum(self._admitted.values())

    def admit(self, layer: CacheLayer) -> bool:
        """Return whether the layer may stay in memory; once admitted, it stays until `remove`.

        Raises:
            PlanError: the budget does not hold the working copies of one layer, or is full and
                there is no offload target.
        """
        if layer in self._admitted:
            return True
        size = layer.final_bytes
        self._largest = max(self._largest, size)
        working = WORKING_COPIES * self._largest
        if self.budget_bytes is None or self.admitted_bytes + size + working <= self.budget_bytes:
            self._admitted[layer] = size
            self.peak_bytes = max(self.peak_bytes, self.admitted_bytes + working)
            return True
        if working > self.budget_bytes:
            raise PlanError(
                f"kv_budget of {self.budget_bytes} bytes does not hold the working copies of one "
                f"layer's cache; use at least kv_budget={working}, or a smaller batch_size"
            )
        if self._outside is None:
            raise PlanError(
                f"kv_budget of {self.budget_bytes} bytes is full and kv_offload=none; use a "
                "smaller n, a larger kv_budget, or kv_offload=disk"
            )
        self.peak_bytes = max(self.peak_bytes, self.admitted_bytes + working)
        return False

    def make_target(self, num_tokens: int) -> OffloadTarget:
        """Make an offload target for a number of tokens."""
        assert self._outside is not None
        return self._outside(num_tokens)

    def record_use(self, layer: CacheLayer) -> None:
        """Record that the layer is used now, in memory or not."""
        if self._last is not None:
            self._next[self._last] = layer
        self._last = layer

    def read(self, layer: CacheLayer) -> tuple[Tensor, Tensor]:
        """Return an offloaded layer's keys and values, read ahead or now."""
        self.num_read += 1
        if self._ahead is not None:
            ahead, future = self._ahead
            self._ahead = None
            if ahead is layer:
                return future.result()
            future.exception()  # of another layer, which will read again itself
        return layer.read()

    def read_ahead(self, layer: CacheLayer) -> None:
        """Start reading the next layer; the current one has written its new tokens."""
        follows = self._next.get(layer)
        is_outside = follows is not None and follows not in self._admitted
        if is_outside and follows is not layer and self._ahead is None:
            assert follows is not None
            self._ahead = follows, self._reader.submit(follows.read)

    def remove(self, layer: CacheLayer) -> None:
        """Remove a layer whose batch has ended."""
        if self._ahead is not None and self._ahead[0] is layer:
            self._ahead[1].exception()  # wait: the offload target is closed next
            self._ahead = None
        self._admitted.pop(layer, None)
        before = [one for one, after in self._next.items() if after is layer]
        for one in before:
            del self._next[one]
        self._next.pop(layer, None)
        if self._last is layer:
            self._last = None

    def close(self) -> None:
        """End the reading thread."""
        self._reader.shutdown()
