"""Reads experts in place from the checkpoint's own safetensors files."""

import os
import threading
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from runtime.errors import CheckpointError, TransferError
from runtime.store.extents import Extent
from runtime.store.index import Recipe
from runtime.store.layout import Piece, SlotLayout, slot_layout


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(tensor.view(torch.uint8).reshape(-1).numpy())


class _OneExpertModel:
    """What the library's operations see as the model: its fused parameter has a single expert."""

    def __init__(self, model: PreTrainedModel, recipe: Recipe):
        self._model = model
        self._recipe = recipe

    def __getattr__(self, name: str):
        return getattr(self._model, name)

    def get_parameter_or_buffer(self, name: str) -> Tensor:
        parameter = self._recipe.parameter
        if name == parameter.target:
            return torch.empty((1, *parameter.shape[1:]), dtype=parameter.dtype, device="meta")
        return self._model.get_parameter_or_buffer(name)

    get_parameter = get_parameter_or_buffer


class CheckpointStore:
    """Brings chunks of experts into slots; thread-safe, holds no expert itself."""

    def __init__(self, model: PreTrainedModel, banks: Sequence[dict[str, Recipe]]):
        """
        Args:
            banks: the recipes of each layer with routed experts, bottom first.

        Raises:
            CheckpointError: layers whose experts differ in shape.
        """
        self._model = model
        self._banks = banks
        self.layout: SlotLayout = slot_layout(banks[0])
        for layer, bank in enumerate(banks):
            if slot_layout(bank) != self.layout:
                raise CheckpointError(f"layer {layer}: its experts differ in shape from layer 0's")
        self._descriptors: dict[Path, int] = {}
        self._lock = threading.Lock()

    @property
    def num_experts(self) -> int:
        return next(iter(self._banks[0].values())).parameter.num_experts

    @property
    def num_layers(self) -> int:
        return len(self._banks)

    @property
    def scratch_bytes(self) -> int:
        """Largest buffer that a read needs beside the slot; 0 when bytes go in as they are."""
        return max(
            (
                sum(
                    extent.num_bytes
                    for extent in self._piece_extents(bank[piece.parameter], piece, 0)
                )
                for bank in self._banks[:1]
                for chunk in self.layout.chunks
                for piece in chunk
                if not self._is_raw(bank[piece.parameter], piece)
            ),
            default=0,
        )

    def _piece_extents(self, recipe: Recipe, piece: Piece, expert: int) -> list[Extent]:
        extents = recipe.extents(expert)
        return extents if piece.source is None else [extents[piece.source]]

    def _is_raw(self, recipe: Recipe, piece: Piece) -> bool:
        if piece.source is None:
            return False
        return recipe.extents(0)[piece.source].dtype == recipe.parameter.dtype

    def read(self, layer: int, expert: int, chunks: range, slot: Tensor) -> None:
        """Fills the chunks' parts of `slot` `(layout.num_bytes,)`, uint8.

        Raises:
            TransferError: short read or I/O error, with the file, the offset and the tensor.
        """
        for chunk in chunks:
            for piece in self.layout.chunks[chunk]:
                recipe = self._banks[layer][piece.parameter]
                target = slot[piece.offset : piece.offset + piece.num_bytes]
                if piece.source is None:
                    self._convert(recipe, expert, target)
                    continue
                extent = recipe.extents(expert)[piece.source]
                if extent.dtype == recipe.parameter.dtype:
                    self._pread(extent, _bytes_of(target))
                else:
                    source = self._tensor(extent).view(-1)
                    target.view(recipe.parameter.dtype).copy_(source)

    def _tensor(self, extent: Extent) -> Tensor:
        tensor = torch.empty(extent.shape, dtype=extent.dtype)
        self._pread(extent, _bytes_of(tensor))
        return tensor

    def _convert(self, recipe: Recipe, expert: int, target: Tensor) -> None:
        """Through the library's own operations, on an input with one expert.

        Quantised storage is never cast before the library's dequantisation has seen it.
        """
        converter, parameter = recipe.converter, recipe.parameter
        assert converter is not None
        extents = recipe.extents(expert)
        values = {
            # An operation on a fused tensor is given one with a single expert.
            pattern: [tensor if recipe.is_per_expert else tensor.unsqueeze(0)]
            for pattern, tensor in zip(recipe.sources, map(self._tensor, extents), strict=True)
        }
        for operation in converter.operations:
            values = operation.convert(
                values,
                source_patterns=converter.source_patterns,
                target_patterns=converter.target_patterns,
                full_layer_name=parameter.target,
                model=_OneExpertModel(self._model, recipe),
                config=self._model.config,
                missing_keys=None,
            )
        result = next(iter(values.values()))
        result = result[0] if isinstance(result, list) else result
        target.view(parameter.dtype).copy_(result.reshape(-1))

    def _descriptor(self, file: Path) -> int:
        with self._lock:
            if file not in self._descriptors:
                self._descriptors[file] = os.open(file, os.O_RDONLY)
            return self._descriptors[file]

    def _pread(self, extent: Extent, target: memoryview) -> None:
        done = 0
        try:
            descriptor = self._descriptor(extent.file)
            while done < extent.num_bytes:
                count = os.preadv(descriptor, [target[done:]], extent.offset + done)
                if count == 0:
                    raise TransferError(
                        f"{extent.file}: ends at byte {extent.offset + done}, inside {extent.key}; "
                        "the file was truncated: fetch it again"
                    )
                done += count
        except OSError as error:
            raise TransferError(
                f"{extent.file}: reading {extent.num_bytes} bytes of {extent.key} at "
                f"{extent.offset} failed: {error}"
            ) from error

    def close(self) -> None:
        """Closes the files; no read may be under way."""
        with self._lock:
            while self._descriptors:
                os.close(self._descriptors.popitem()[1])
