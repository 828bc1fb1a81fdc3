"""The cache that a batch generates with: Transformers' own, one with a budget, or one of sinks."""

from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from runtime.errors import PlanError
from runtime.generation.batch.config import Offload
from runtime.generation.kv.manager import KVCacheManager
from runtime.generation.kv.offload import DiskOffload, HostOffload, OffloadTarget
from runtime.generation.kv.offloaded_layer import OffloadedCacheLayer


class KVCacheFactory(Protocol):
    """Makes a cache for each batch."""

    def make(self, padding_B: Tensor, *, max_cache_length: int) -> Cache | None:
        """`padding_B`: columns of padding on the left of each row; None: Transformers' own."""
        ...

    def end(self, cache: Cache | None) -> None:
        """The batch is over."""
        ...

    def close(self) -> None:
        """No more batches."""
        ...


class PlainCacheFactory:
    """Transformers' own caches, which nobody counts."""

    def make(self, padding_B: Tensor, *, max_cache_length: int) -> Cache | None:
        del padding_B, max_cache_length
        return None

    def end(self, cache: Cache | None) -> None:
        """The garbage collector's."""

    def close(self) -> None:
        """Nothing to close."""


class BudgetedCacheFactory:
    """Caches of a group within a budget.

    Raises:
        PlanError: the model keeps something else than all tokens' keys and values.
    """

    def __init__(self, model: PreTrainedModel, room: KVCacheManager):
        self._num_layers = count_full_layers(model, "kv_budget")
        self._room = room

    def make(self, padding_B: Tensor, *, max_cache_length: int) -> Cache:
        del padding_B
        make = partial(OffloadedCacheLayer, self._room, max_cache_length=max_cache_length)
        return Cache(layers=[make() for _ in range(self._num_layers)])

    def end(self, cache: Cache | None) -> None:
        for layer in cache.layers if cache is not None else ():
            layer.close()

    def close(self) -> None:
        self._room.close()


class SinkCacheFactory:
    """Caches of sinks and a window.

    Raises:
        PlanError: the model keeps something else than all tokens' keys and values.
    """

    def __init__(self, model: PreTrainedModel, *, sinks: int, window: int):
        self._num_layers = count_full_layers(model, "window")
        self._sinks = sinks
        self._window = window

    def make(self, padding_B: Tensor, *, max_cache_length: int) -> Cache:
        del max_cache_length
        make = partial(SinkCacheLayer, padding_B, sinks=self._sinks, window=self._window)
        return Cache(layers=[make() for _ in range(self._num_layers)])

    def end(self, cache: Cache | None) -> None:
        for layer in cache.layers if cache is not None else ():
            layer.close()

    def close(self) -> None:
        """Nothing to close."""


def count_full_layers(model: PreTrainedModel, option: str) -> int:
    """Layers of the model's cache, all of which keep every token.

    Raises:
        PlanError: some do not; the message names `option`.
    """
    kinds: set[str] = set()
    if not model.config.is_encoder_decoder:
        layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
        kinds = {type(layer).__name__ for layer in layers}
        if layers and all(type(layer) is DynamicLayer for layer in layers):
            return len(layers)
    what = ", ".join(sorted(kinds)) or "an encoder's states"
    raise PlanError(
        f"{option}: {type(model).__name__} keeps {what}; this option is for models whose every "
        f"layer keeps all tokens' keys and values: leave {option} out"
    )


def make_offload_factory(offload: Offload, device: torch.device, folder: Path | None):
    """What makes a place for caches that have no room; None where there is to be none.

    Raises:
        PlanError: host memory is where the model computes.
    """
    on_device = device.type != "cpu"
    if offload is Offload.AUTO:
        offload = Offload.HOST if on_device else Offload.DISK
    if offload is Offload.HOST and not on_device:
        raise PlanError(
            "kv_offload=host: the model computes in host memory already; use kv_offload=disk"
        )
    if offload is Offload.NONE:
        return None

    def make(num_tokens: int) -> OffloadTarget:
        return DiskOffload(folder) if offload is Offload.DISK else HostOffload(num_tokens)

    return make


class SinkCacheLayer(DynamicLayer):
    """Keeps `sinks` first tokens of each row and `window` last ones, where they were: positions
    are not counted anew. The prompt itself is computed with full attention.

    Of a row with padding on its left the first tokens are those behind the padding, so rows drop
    other columns: a row that has no more than it may keep still drops padding, a longer one drops
    its oldest token that is no sink. What is kept of a row of which more was seen is all tokens,
    so that the attention mask's last columns, which Transformers takes for them, are right.

    Args:
        padding_B: columns of padding on the left of each row.
    """

    is_croppable = False

    def __init__(self, padding_B: Tensor, *, sinks: int, window: int):
        super().__init__()
        self._padding_B = padding_B
        self._sinks = sinks
        self._keep = sinks + window
        self._seen = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        before, self._seen = self._seen, self._seen + key_states.shape[-2]
        if keys.shape[-2] > self._keep:
            columns_BT = self._columns(keys, before)
            self.keys, self.values = (
                _gather_columns(keys, columns_BT),
                _gather_columns(values, columns_BT),
            )
        return keys, values

    def _columns(self, keys: Tensor, before: int) -> Tensor:
        """`[B, T]`: columns of `keys` to keep, ascending."""
        num_columns, keep = keys.shape[-2], self._keep
        padding_B = self._padding_B.to(keys.device)
        # Of what is here, a row's sinks begin behind its padding, if any is left.
        had_B = torch.clamp(before - padding_B, min=0) if before else torch.zeros_like(padding_B)
        num_before = num_columns - (self._seen - before)
        first_B = torch.where(had_B > 0, torch.clamp(num_before - had_B, min=0), padding_B)
        last_T = torch.arange(num_columns - keep, num_columns, device=keys.device)
        sinks_BT = first_B[:, None] + torch.arange(self._sinks, device=keys.device)
        has_all_B = first_B <= num_columns - keep
        own_BT = last_T.expand(len(padding_B), keep).clone()
        own_BT[:, : self._sinks] = torch.where(
            has_all_B[:, None], sinks_BT, own_BT[:, : self._sinks]
        )
        return own_BT

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        kept = 0 if not self.is_initialized or self.keys.numel() == 0 else self.keys.shape[-2]
        return kept + query_length, self._seen - kept

    def get_seq_length(self) -> int:
        return self._seen

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise PlanError(
                "window: tokens that have left the window cannot be taken back, as assisted "
                "generation asks; generate without window="
            )

    def close(self) -> None:
        """Its batch is over."""
        self.keys = self.values = None


def _gather_columns(tensor_BHTD: Tensor, columns_BT: Tensor) -> Tensor:
    rows, heads, _, width = tensor_BHTD.shape
    index = columns_BT[:, None, :, None].expand(rows, heads, columns_BT.shape[1], width)
    return tensor_BHTD.gather(2, index)
