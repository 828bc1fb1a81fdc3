"""KV-cache layers within a memory budget: which stay in memory, and where the others are read from.

Transformers' `DynamicCache(offloading=True)` moves every layer, whole and from a GPU only. Here as
many layers as a budget in bytes holds stay, the others append their new tokens to host memory or a
file, and of batches that take turns the layer that is used next is read ahead.

Shape suffixes: B rows, H heads, T tokens, D width of a head.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from runtime.accelerator import open_accelerator
from runtime.errors import PlanError
from runtime.store.spill import SpillFile

WORKING_COPIES = 3
"""Copies of one cache layer in memory at once: the old one, the one with new tokens, and the one
being read for the next layer."""


class DiskOffload:
    """A temporary file; raises TransferError as `SpillFile` does."""

    def __init__(self) -> None:
        self._file = SpillFile("moecast-kv-", cure="give a larger kv_budget or a smaller n")
        self._shape: torch.Size | None = None
        self._dtype = torch.float32

    def write(self, first: int, part_TBHD: Tensor) -> None:
        """Write tokens from index `first` on; all earlier ones have been written."""
        self._shape, self._dtype = part_TBHD.shape[1:], part_TBHD.dtype
        position = first * self._shape.numel() * self._dtype.itemsize
        self._file.write(part_TBHD.cpu().contiguous(), position, what="a KV cache")

    def read(self, num_tokens: int) -> Tensor:
        """Read the first tokens as `[T, B, H, D]` on the CPU."""
        assert self._shape is not None
        buffer = torch.empty((num_tokens, *self._shape), dtype=self._dtype)
        self._file.read(buffer, 0, what="a KV cache")
        return buffer

    def close(self) -> None:
        self._file.close()


class HostOffload:
    """Host memory for a model on a GPU, pinned so that copies overlap with computation."""

    def __init__(self, num_tokens: int):
        self._num_tokens = num_tokens
        self._memory: Tensor | None = None

    def write(self, first: int, part_TBHD: Tensor) -> None:
        if self._memory is None:
            accelerator = open_accelerator(part_TBHD.device)
            self._memory = torch.empty(
                (self._num_tokens, *part_TBHD.shape[1:]),
                dtype=part_TBHD.dtype,
                pin_memory=accelerator is not None and accelerator.pins_memory,
            )
        self._memory[first : first + len(part_TBHD)].copy_(part_TBHD)

    def read(self, num_tokens: int) -> Tensor:
        assert self._memory is not None
        return self._memory[:num_tokens]

    def close(self) -> None:
        self._memory = None


OffloadTarget = DiskOffload | HostOffload
"""Append-only storage for the keys or the values of one cache layer."""


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
        self._admitted: dict[OffloadedCacheLayer, int] = {}
        self._largest = 0
        self.num_read = 0
        self.peak_bytes = 0
        """Most bytes admitted and in use at once."""
        self._next: dict[OffloadedCacheLayer, OffloadedCacheLayer] = {}
        """The layer used after each layer in the last step."""
        self._last: OffloadedCacheLayer | None = None
        self._ahead: tuple[OffloadedCacheLayer, Future[tuple[Tensor, Tensor]]] | None = None
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="moecast kv")

    @property
    def admitted_bytes(self) -> int:
        """Bytes of the admitted layers at their final lengths."""
        return sum(self._admitted.values())

    def admit(self, layer: "OffloadedCacheLayer") -> bool:
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
        budget = self.budget_bytes
        fits = budget is None or self.admitted_bytes + size + working <= budget
        if fits:
            self._admitted[layer] = size
        elif budget is not None and working > budget:
            raise PlanError(
                f"kv_budget of {budget} bytes does not hold the working copies of one "
                f"layer's cache; use at least kv_budget={working}, or a smaller batch_size"
            )
        elif self._outside is None:
            raise PlanError(
                f"kv_budget of {budget} bytes is full and kv_offload=none; use a "
                "smaller n, a larger kv_budget, or kv_offload=disk"
            )
        self.peak_bytes = max(self.peak_bytes, self.admitted_bytes + working)
        return fits

    def make_target(self, num_tokens: int) -> OffloadTarget:
        """Make an offload target for a number of tokens."""
        assert self._outside is not None
        return self._outside(num_tokens)

    def record_use(self, layer: "OffloadedCacheLayer") -> None:
        """Record that the layer is used now, in memory or not."""
        if self._last is not None:
            self._next[self._last] = layer
        self._last = layer

    def read(self, layer: "OffloadedCacheLayer") -> tuple[Tensor, Tensor]:
        """Return an offloaded layer's keys and values, read ahead or now."""
        self.num_read += 1
        if self._ahead is not None:
            ahead, future = self._ahead
            self._ahead = None
            if ahead is layer:
                return future.result()
            future.exception()  # of another layer, which will read again itself
        return layer.read()

    def read_ahead(self, layer: "OffloadedCacheLayer") -> None:
        """Start reading the next layer; the current one has written its new tokens."""
        follows = self._next.get(layer)
        is_outside = follows is not None and follows not in self._admitted
        if is_outside and follows is not layer and self._ahead is None:
            assert follows is not None
            self._ahead = follows, self._reader.submit(follows.read)

    def remove(self, layer: "OffloadedCacheLayer") -> None:
        """Remove a layer whose batch has ended."""
        if self._ahead is not None and self._ahead[0] is layer:
            self._ahead[1].exception()  # wait: the offload target is closed next
            self._ahead = None
        self._admitted.pop(layer, None)
        self._next = {
            before: after for before, after in self._next.items() if layer not in (before, after)
        }
        if self._last is layer:
            self._last = None

    def close(self) -> None:
        """End the reading thread."""
        self._reader.shutdown()


class OffloadedCacheLayer(DynamicLayer):
    """A `DynamicLayer`, `[B, H, T, D]`, offloaded unless admitted; bitwise Transformers' own."""

    is_croppable = False

    def __init__(self, manager: KVCacheManager, *, max_cache_length: int):
        super().__init__()
        self._manager = manager
        self._max_cache_length = max_cache_length
        self._length = 0
        self.final_bytes = 0
        """Bytes at its final length."""
        self.keys: Tensor | None
        self.values: Tensor | None
        self._outside: tuple[OffloadTarget, OffloadTarget] | None = None
        self._written = 0
        """Number of offloaded tokens."""
        self._is_admitted = False
        self._is_closed = False

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        del args, kwargs
        if not self.final_bytes:
            per_token = key_states[:, :, :1].numel() + value_states[:, :, :1].numel()
            self.final_bytes = per_token * key_states.element_size() * self._max_cache_length
        manager = self._manager
        manager.record_use(self)
        is_offloaded = self._length > 0 and not self._is_admitted
        if is_offloaded:
            past_keys, past_values = manager.read(self)
            full = _append_tokens(past_keys, key_states), _append_tokens(past_values, value_states)
            del past_keys, past_values
        else:
            full = super().update(key_states, value_states)
        self._length += key_states.shape[-2]
        assert self._length <= self._max_cache_length, (self._length, self._max_cache_length)
        if manager.admit(self):
            self.keys, self.values = full
            self._is_admitted = True
        else:
            self._write(*full)
            self.keys = self.values = key_states.new_empty(0)
        manager.read_ahead(self)
        return full

    def _write(self, *full: Tensor) -> None:
        if self._outside is None:
            most = self._max_cache_length
            self._outside = self._manager.make_target(most), self._manager.make_target(most)
        for place, tensor in zip(self._outside, full, strict=True):
            place.write(self._written, tensor[:, :, self._written :].permute(2, 0, 1, 3))
        self._written = self._length

    def read(self) -> tuple[Tensor, Tensor]:
        """Read the offloaded keys and values, `[T, B, H, D]` each."""
        assert self._outside is not None
        keys, values = self._outside
        return keys.read(self._written), values.read(self._written)

    def get_seq_length(self) -> int:
        return self._length

    def reset(self) -> None:
        self.close()

    def close(self) -> None:
        """Free the memory and the offload targets."""
        if self._is_closed:
            return
        self._is_closed = True
        self._manager.remove(self)
        self.keys = self.values = None
        for place in self._outside or ():
            place.close()


def _append_tokens(past_TBHD: Tensor, new_BHTD: Tensor) -> Tensor:
    """Join past and new tokens to one contiguous `[B, H, T, D]`.

    The memory layout is that of a concatenation: another layout may change a product's last bits.
    """
    rows, heads, num_new, width = new_BHTD.shape
    num_past = len(past_TBHD)
    full = new_BHTD.new_empty(rows, heads, num_past + num_new, width)
    full[:, :, :num_past].copy_(past_TBHD.permute(1, 2, 0, 3), non_blocking=True)
    full[:, :, num_past:].copy_(new_BHTD)
    return full
