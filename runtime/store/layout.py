"""The slot layout of experts that are read from a checkpoint."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.store.weight_plan import FusedParameter, WeightPlan

ALIGNMENT = 64
"""Bytes. Kernels take other paths on unaligned weights, and then the last bits differ."""


def align(num_bytes: int, alignment: int = ALIGNMENT) -> int:
    return math.ceil(num_bytes / alignment) * alignment


@dataclass(frozen=True)
class SlotPiece:
    """A contiguous part of the slot that is read at once."""

    parameter: str
    source: int | None
    """Index of the weight plan's source; None: all of them, through Transformers' operations."""
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class SlotLayout:
    """Offsets of a layer's parameters in a slot, as the model computes with them."""

    offsets: dict[str, int]
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, torch.dtype]
    chunks: tuple[tuple[SlotPiece, ...], ...]
    """ProMoE, section 5.1: one chunk for each linear layer; a bias is part of its matrix's
    chunk."""
    num_bytes: int

    @property
    def chunk_bytes(self) -> list[int]:
        return [sum(piece.num_bytes for piece in chunk) for chunk in self.chunks]

    @property
    def chunk_ranges(self) -> list[list[tuple[int, int]]]:
        """Each chunk's parts of the slot as `(start, end)` bytes."""
        return [
            [(piece.offset, piece.offset + piece.num_bytes) for piece in chunk]
            for chunk in self.chunks
        ]

    views_are_weights = True
    decoded_bytes = 0
    alignment = ALIGNMENT

    def weights(self, slot: Tensor) -> dict[str, Tensor]:
        """The slot's bytes `(num_bytes,)` as the expert's parameters."""
        views = {}
        for name, offset in self.offsets.items():
            size = math.prod(self.shapes[name]) * self.dtypes[name].itemsize
            views[name] = (
                slot[offset : offset + size].view(self.dtypes[name]).view(self.shapes[name])
            )
        return views


def build_slot_layout(plans: Mapping[str, WeightPlan]) -> SlotLayout:
    """Parameters one after another, each aligned; sources of one parameter back to back."""
    offsets: dict[str, int] = {}
    chunks: list[list[SlotPiece]] = []
    end = 0
    for name, plan in plans.items():
        shape, dtype = plan.parameter.shape[1:], plan.parameter.dtype
        offsets[name] = start = align(end)
        end = start + math.prod(shape) * dtype.itemsize
        if plan.is_plain:
            pieces, place = [], start
            for i, extent in enumerate(plan.extents(0)):
                size = math.prod(extent.shape) * dtype.itemsize
                pieces.append(SlotPiece(name, i, place, size))
                place += size
            assert place == end, (name, place, end)
        else:
            pieces = [SlotPiece(name, None, start, end - start)]
        if len(shape) == 1 and chunks:
            chunks[-1].extend(pieces)
        else:
            chunks.extend([piece] for piece in pieces)
    return SlotLayout(
        offsets=offsets,
        shapes={name: plan.parameter.shape[1:] for name, plan in plans.items()},
        dtypes={name: plan.parameter.dtype for name, plan in plans.items()},
        chunks=tuple(tuple(chunk) for chunk in chunks),
        num_bytes=align(end),
    )


def assume_slot_layout(parameters: Sequence[FusedParameter]) -> SlotLayout:
    """The layout of experts whose checkpoint is not there: a chunk for each parameter.

    Parameters of gate and up are two chunks, as most checkpoints store them.
    """
    offsets: dict[str, int] = {}
    chunks: list[list[SlotPiece]] = []
    end = 0
    for parameter in parameters:
        name, shape = parameter.name, parameter.shape[1:]
        num_parts = 2 if "gate_up" in name and len(shape) > 1 and shape[0] % 2 == 0 else 1
        offsets[name] = start = align(end)
        end = start + math.prod(shape) * parameter.dtype.itemsize
        size = (end - start) // num_parts
        pieces = [SlotPiece(name, i, start + i * size, size) for i in range(num_parts)]
        if len(shape) == 1 and chunks:
            chunks[-1].extend(pieces)
        else:
            chunks.extend([piece] for piece in pieces)
    return SlotLayout(
        offsets=offsets,
        shapes={parameter.name: parameter.shape[1:] for parameter in parameters},
        dtypes={parameter.name: parameter.dtype for parameter in parameters},
        chunks=tuple(tuple(chunk) for chunk in chunks),
        num_bytes=align(end),
    )
