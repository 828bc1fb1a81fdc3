"""Reads experts in place from the checkpoint's own safetensors files."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from runtime.config import PageCache
from runtime.store.base import bytes_of
from runtime.store.extents import Extent
from runtime.store.files import FileReader
from runtime.store.recipe import Recipe
from runtime.store.layout import Piece, SlotLayout, slot_layout


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

    def __init__(
        self,
        model: PreTrainedModel,
        banks: Sequence[dict[str, Recipe]],
        *,
        page_cache: PageCache = PageCache.BYPASS,
    ):
        """
        Args:
            banks: the recipes of each layer with routed experts, bottom first.
        """
        self._model = model
        self._banks = banks
        self.layouts: list[SlotLayout] = [slot_layout(bank) for bank in banks]
        self._files = FileReader(page_cache=page_cache)

    @property
    def experts_per_layer(self) -> list[int]:
        return [
            max(recipe.parameter.num_experts for recipe in bank.values()) for bank in self._banks
        ]

    @property
    def num_experts(self) -> int:
        return max(self.experts_per_layer)

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
                for bank, layout in zip(self._banks, self.layouts, strict=True)
                for chunk in layout.chunks
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
        """Fills the chunks' parts of `slot`, uint8, at least `layouts[layer].num_bytes` long.

        Raises:
            TransferError: short read or I/O error, with the file, the offset and the tensor.
        """
        for chunk in chunks:
            for piece in self.layouts[layer].chunks[chunk]:
                recipe = self._banks[layer][piece.parameter]
                target = slot[piece.offset : piece.offset + piece.num_bytes]
                if piece.source is None:
                    self._convert(recipe, expert, target)
                    continue
                extent = recipe.extents(expert)[piece.source]
                if extent.dtype == recipe.parameter.dtype:
                    self._pread(extent, bytes_of(target))
                else:
                    source = self._tensor(extent).view(-1)
                    target.view(recipe.parameter.dtype).copy_(source)

    def _tensor(self, extent: Extent) -> Tensor:
        tensor = torch.empty(extent.shape, dtype=extent.dtype)
        self._pread(extent, bytes_of(tensor))
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

    def _pread(self, extent: Extent, target: memoryview) -> None:
        self._files.read(extent.file, extent.offset, target, what=extent.key)

    def close(self) -> None:
        """Closes the files; no read may be under way."""
        self._files.close()
