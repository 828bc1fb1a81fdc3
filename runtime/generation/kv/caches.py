"""The cache that a batch generates with: Transformers' own, one with a budget, or one of sinks."""

from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from runtime.generation.batch.config import Offload
from runtime.generation.batch.errors import PlanError
from runtime.generation.kv.outside import OnDisk, OnHost, Outside
from runtime.generation.kv.room import Room
from runtime.generation.kv.sinks import SinkLayer
from runtime.generation.kv.stored import StoredLayer


class Caches(Protocol):
    """Makes a cache for each batch."""

    def make(self, padding_B: Tensor, *, most_tokens: int) -> Cache | None:
        """`padding_B`: columns of padding on the left of each row; None: Transformers' own."""
        ...

    def end(self, cache: Cache | None) -> None:
        """The batch is over."""
        ...

    def close(self) -> None:
        """No more batches."""
        ...


class Plain:
    """Transformers' own caches, which nobody counts."""

    def make(self, padding_B: Tensor, *, most_tokens: int) -> Cache | None:
        del padding_B, most_tokens
        return None

    def end(self, cache: Cache | None) -> None:
        """The garbage collector's."""

    def close(self) -> None:
        """Nothing to close."""


class Budgeted:
    """Caches of a group within a budget.

    Raises:
        PlanError: the model keeps something else than all tokens' keys and values.
    """

    def __init__(self, model: PreTrainedModel, room: Room):
        self._num_layers = full_layers(model, "kv_budget")
        self._room = room

    def make(self, padding_B: Tensor, *, most_tokens: int) -> Cache:
        del padding_B
        make = partial(StoredLayer, self._room, most_tokens=most_tokens)
        return Cache(layers=[make() for _ in range(self._num_layers)])

    def end(self, cache: Cache | None) -> None:
        for layer in cache.layers if cache is not None else ():
            layer.close()

    def close(self) -> None:
        self._room.close()


class Sinks:
    """Caches of sinks and a window.

    Raises:
        PlanError: the model keeps something else than all tokens' keys and values.
    """

    def __init__(self, model: PreTrainedModel, *, sinks: int, window: int):
        self._num_layers = full_layers(model, "window")
        self._sinks = sinks
        self._window = window

    def make(self, padding_B: Tensor, *, most_tokens: int) -> Cache:
        del most_tokens
        make = partial(SinkLayer, padding_B, sinks=self._sinks, window=self._window)
        return Cache(layers=[make() for _ in range(self._num_layers)])

    def end(self, cache: Cache | None) -> None:
        for layer in cache.layers if cache is not None else ():
            layer.close()

    def close(self) -> None:
        """Nothing to close."""


def full_layers(model: PreTrainedModel, option: str) -> int:
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


def outside_of(offload: Offload, device: torch.device, folder: Path | None):
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

    def make(num_tokens: int) -> Outside:
        return OnDisk(folder) if offload is Offload.DISK else OnHost(num_tokens)

    return make
