"""KV caches for batches: Transformers' own, with a memory budget, or sinks and a window."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from runtime.errors import PlanError
from runtime.generation.config import Offload
from runtime.generation.kv_offload import (
    DiskOffload,
    HostOffload,
    KVCacheManager,
    OffloadedCacheLayer,
    OffloadTarget,
)


@dataclass
class KVCacheFactory:
    """Makes a KV cache for each batch; without layers it leaves it to Transformers."""

    num_layers: int = 0
    make_layer: Callable[[Tensor, int], CacheLayerMixin] | None = None
    """Makes a layer for columns of padding on the left of each row, and tokens per row when the
    last row ends."""
    close: Callable[[], None] = lambda: None
    """Frees what the factory itself holds."""

    def make(self, padding_B: Tensor, *, max_cache_length: int) -> Cache | None:
        """Make a cache, whose layers are closed when its batch has ended.

        None for Transformers' own.
        """
        if self.make_layer is None:
            return None
        layers = [self.make_layer(padding_B, max_cache_length) for _ in range(self.num_layers)]
        return Cache(layers=layers)


def budgeted_caches(model: PreTrainedModel, manager: KVCacheManager) -> KVCacheFactory:
    """KV caches of a group within a memory budget.

    Raises:
        PlanError: the model's layers do not keep the keys and values of all tokens.
    """
    return KVCacheFactory(
        count_full_layers(model, "kv_budget"),
        lambda _, length: OffloadedCacheLayer(manager, max_cache_length=length),
        manager.close,
    )


def sink_caches(model: PreTrainedModel, *, sinks: int, window: int) -> KVCacheFactory:
    """KV caches of the first tokens (sinks) and a window of last ones; raises as above."""
    return KVCacheFactory(
        count_full_layers(model, "window"),
        lambda padding_B, _: SinkCacheLayer(padding_B, sinks=sinks, window=window),
    )


def count_full_layers(model: PreTrainedModel, option: str) -> int:
    """Count the layers of the model's KV cache, which must all keep every token.

    Raises:
        PlanError: a layer does not; the message names `option`.
    """
    kinds: set[str] = set()
    if not model.config.is_encoder_decoder:
        layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
        kinds = {type(layer).__name__ for layer in layers}
        if layers and all(type(layer) is DynamicLayer for layer in layers):
            return len(layers)
    what = ", ".join(sorted(kinds)) or "an encoder's states"
    raise PlanError(
        f"{option}: the KV cache of {type(model).__name__} consists of {what}; this option needs a "
        f"model whose every layer keeps the keys and values of all tokens: leave {option} out"
    )


def make_offload_factory(
    offload: Offload, device: torch.device
) -> Callable[[int], OffloadTarget] | None:
    """Return the function that makes an offload target, or None for `none`.

    Raises:
        PlanError: host offload for a model that computes in host memory.
    """
    on_device = device.type != "cpu"
    if offload is Offload.AUTO:
        offload = Offload.HOST if on_device else Offload.DISK
    if offload is Offload.HOST and not on_device:
        raise PlanError(
            "kv_offload=host: the model already computes in host memory; use kv_offload=disk"
        )
    if offload is Offload.NONE:
        return None

    return HostOffload if offload is Offload.HOST else lambda _: DiskOffload()


class SinkCacheLayer(DynamicLayer):
    """Keeps each row's first `sinks` and last `window` tokens (Klotski, section 7, "Compression").

    Kept tokens keep their positions. The prompt itself is computed with full attention.

    A row's first tokens are those after its padding, so rows drop different columns: a row with no
    more tokens than it may keep drops padding, a longer one its oldest token that is not a sink.
    No padding is kept for a row that has seen more tokens than it keeps: Transformers applies the
    last columns of the attention mask to the kept ones.

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
            self.keys = _gather_columns(keys, columns_BT)
            self.values = _gather_columns(values, columns_BT)
        return keys, values

    def _columns(self, keys: Tensor, before: int) -> Tensor:
        """`[B, T]`: columns of `keys` to keep, ascending."""
        num_columns, keep = keys.shape[-2], self._keep
        padding_B = self._padding_B.to(keys.device)
        # A row's sinks begin after its padding, if any is left.
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
                "window: assisted generation takes tokens back, which is impossible once they have "
                "left the window; generate without window="
            )

    def close(self) -> None:
        """Free the layer's memory."""
        self.keys = self.values = None


def _gather_columns(tensor_BHTD: Tensor, columns_BT: Tensor) -> Tensor:
    rows, heads, _, width = tensor_BHTD.shape
    index = columns_BT[:, None, :, None].expand(rows, heads, columns_BT.shape[1], width)
    return tensor_BHTD.gather(2, index)
