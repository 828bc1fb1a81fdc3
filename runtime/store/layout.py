"""The slot layout of experts that are read from a checkpoint."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from runtime.store.weight_plan import FusedParameter, WeightPlan

ALIGNMENT = 64
"""Bytes. Kernels take other paths on unaligned weights, and then the last bits differ."""


def align(num_bytes: int, alignment: int = ALIGNMENT) -> int:
    return math.ceil(num_bytes / alignment) * alignment


@dataclass(frozen=True)
class EncodedParameter:
    """A quantised parameter that lies in the slot as it does in the checkpoint."""

    tensors: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    """Shape and dtype of each of the checkpoint's tensors of one expert."""
    decode: Callable[[list[Tensor]], Tensor]
    """Makes the parameter of these tensors, on their device."""
    decoding_bytes: int
    """Memory that `decode` takes, its result included."""


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
    """Offsets of a layer's parameters in a slot.

    They are as the model computes with them, or encoded as in the checkpoint; then `weights`
    decodes them.
    """

    offsets: dict[str, int]
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, torch.dtype]
    chunks: tuple[tuple[SlotPiece, ...], ...]
    """ProMoE, section 5.1: one chunk for each linear layer; a bias is part of its matrix's
    chunk."""
    num_bytes: int
    encoded: Mapping[str, EncodedParameter] = field(default_factory=dict)

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

    alignment = ALIGNMENT

    @property
    def views_are_weights(self) -> bool:
        return not self.encoded

    @property
    def decoded_bytes(self) -> int:
        """Memory that `weights` needs in addition to the slot: parameters and a decoder's own."""
        results = {
            name: math.prod(self.shapes[name]) * self.dtypes[name].itemsize for name in self.encoded
        }
        buffers = (one.decoding_bytes - results[name] for name, one in self.encoded.items())
        return sum(results.values()) + max(buffers, default=0)

    def weights(self, slot: Tensor) -> dict[str, Tensor]:
        """The slot's bytes `(num_bytes,)` as the expert's parameters: views, or decoded tensors."""
        parameters = {}
        for name, offset in self.offsets.items():
            if (encoded := self.encoded.get(name)) is not None:
                tensors = [
                    _view(slot, piece.offset, *encoded.tensors[piece.source])
                    for piece in self._pieces(name)
                    if piece.source is not None
                ]
                parameters[name] = encoded.decode(tensors)
            else:
                parameters[name] = _view(slot, offset, self.shapes[name], self.dtypes[name])
        return parameters

    def _pieces(self, parameter: str) -> list[SlotPiece]:
        return [piece for chunk in self.chunks for piece in chunk if piece.parameter == parameter]


def _view(slot: Tensor, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    size = math.prod(shape) * dtype.itemsize
    return slot[offset : offset + size].view(dtype).view(shape)


def name_encoding(layouts: Sequence[SlotLayout]) -> str:
    """Returns the dtype of the largest tensor of the checkpoint that slots hold as it is."""
    tensors = [t for layout in layouts for one in layout.encoded.values() for t in one.tensors]
    _, dtype = max(tensors, key=lambda tensor: math.prod(tensor[0]) * tensor[1].itemsize)
    return str(dtype).removeprefix("torch.")


def describe_encoded(layouts: Sequence[SlotLayout]) -> str | None:
    """Returns what the slots hold where that is not what the model computes with; else None."""
    if not any(layout.encoded for layout in layouts):
        return None
    return (
        f"experts stay quantised in memory, as the checkpoint has them ({name_encoding(layouts)}), "
        "and are decoded before each use; moecast pack quantise=int4 makes experts that are "
        "multiplied as they are"
    )


def build_slot_layout(
    plans: Mapping[str, WeightPlan], encoded: Mapping[str, EncodedParameter]
) -> SlotLayout:
    """Parameters one after another, each aligned; sources of one parameter back to back.

    Tensors of an encoded parameter are aligned each, and travel in one chunk.
    """
    sources: dict[str, list[int] | None] = {}
    for name, plan in plans.items():
        extents, itemsize = plan.extents(0), plan.parameter.dtype.itemsize
        if name in encoded:
            sources[name] = [extent.num_bytes for extent in extents]
        elif plan.is_plain:
            sources[name] = [math.prod(extent.shape) * itemsize for extent in extents]
        else:
            sources[name] = None
    return _lay_out([plan.parameter for plan in plans.values()], sources, encoded)


def assume_slot_layout(parameters: Sequence[FusedParameter]) -> SlotLayout:
    """The layout of experts whose checkpoint is not there: a chunk for each parameter.

    Parameters of gate and up are two chunks, as most checkpoints store them.
    """
    sources: dict[str, list[int] | None] = {}
    for parameter in parameters:
        name, shape = parameter.name, parameter.shape[1:]
        num_parts = 2 if "gate_up" in name and len(shape) > 1 and shape[0] % 2 == 0 else 1
        size = math.prod(shape) * parameter.dtype.itemsize
        sources[name] = [size // num_parts] * num_parts
    return _lay_out(parameters, sources, {})


def _lay_out(
    parameters: Sequence[FusedParameter],
    sources: Mapping[str, list[int] | None],
    encoded: Mapping[str, EncodedParameter],
) -> SlotLayout:
    """Give every source its place.

    Args:
        sources: bytes of each parameter's sources in the slot; None: one result of them all.
    """
    offsets: dict[str, int] = {}
    chunks: list[list[SlotPiece]] = []
    end = 0
    for parameter in parameters:
        name, shape = parameter.name, parameter.shape[1:]
        num_bytes = math.prod(shape) * parameter.dtype.itemsize
        offsets[name] = end = start = align(end)
        pieces = []
        for i, size in enumerate(sources[name] or [num_bytes]):
            place = align(end) if name in encoded else end
            pieces.append(SlotPiece(name, None if sources[name] is None else i, place, size))
            end = place + size
        assert name in encoded or end == start + num_bytes, (name, start, end)
        if name in encoded:
            chunks.append(pieces)
        elif len(shape) == 1 and chunks:
            chunks[-1].extend(pieces)
        else:
            chunks.extend([piece] for piece in pieces)
    return SlotLayout(
        offsets=offsets,
        shapes={parameter.name: parameter.shape[1:] for parameter in parameters},
        dtypes={parameter.name: parameter.dtype for parameter in parameters},
        chunks=tuple(map(tuple, chunks)),
        num_bytes=align(end),
        encoded=encoded,
    )
