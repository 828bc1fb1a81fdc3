"""A KV-cache layer that may be offloaded while other batches compute; bitwise Transformers' own.

Shape suffixes: B rows, H heads, T tokens, D width of a head.
"""

from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicLayer

from runtime.generation.kv.manager import KVCacheManager
from runtime.generation.kv.offload import OffloadTarget


class OffloadedCacheLayer(DynamicLayer):
    """A `DynamicLayer`, `[B, H, T, D]`, whose tokens are offloaded unless the manager admits it.

    Args:
        manager: decides whether the layer stays in memory.
        max_cache_length: most tokens per row; more are an internal error.
    """

    is_croppable = False

    def __init__(self, manager: KVCacheManager, *, max_cache_length: int):
        super().__init__()
        self._manager = manager
        self._max_cache_length = max_cache_length
        self._length = 0
        self._final_bytes = 0
        self.keys: Tensor | None
        self.values: Tensor | None
        self._outside: tuple[OffloadTarget, OffloadTarget] | None = None
        self._written = 0
        """Number of offloaded tokens."""
        self._is_admitted = False
        self._is_closed = False

    @property
    def final_bytes(self) -> int:
        return self._final_bytes

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        del args, kwargs
        if not self._final_bytes:
            per_token = key_states[:, :, :1].numel() + value_states[:, :, :1].numel()
            self._final_bytes = per_token * key_states.element_size() * self._max_cache_length
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
