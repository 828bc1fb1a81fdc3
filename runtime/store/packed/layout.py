"""The layout of an expert's record, the same in the file and in the slot.

A record consists of chunks that begin and end on a block, so that each is one direct read from the
file into the slot. Weights have the model's order, so that the slot holds the parameters; or they
are integers with a scale for each group, which `weights` decodes, or leaves as they are for kernels
that multiply them (`runtime.store.packed.matrix`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from runtime.store.files import BLOCK
from runtime.store.layout import SlotLayout, align
from runtime.store.packed.blocks import fits, native_block
from runtime.store.packed.coding import RAW, Coding, decode
from runtime.store.packed.kernel_choice import has_kernel
from runtime.store.packed.matrix import ExpertWeights, QuantisedMatrix, view_rows


@dataclass(frozen=True)
class PackedPart:
    """Consecutive weights of a parameter that travel in one chunk."""

    parameter: str
    first: int
    """Index of the first weight, row by row."""
    num_weights: int
    coding: Coding
    offset: int
    """Offset of the weights or integers in the slot; scales and zeros follow, each aligned."""

    def bytes_as(self, dtype: torch.dtype) -> int:
        return self.coding.num_bytes(self.num_weights, dtype)


@dataclass(frozen=True)
class PackedLayout:
    """The layout of a packed record, the same for every expert of a layer."""

    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, torch.dtype]
    chunks: tuple[tuple[PackedPart, ...], ...]
    ends: tuple[int, ...]
    """End of each chunk in bytes, where the next begins."""
    uses_kernels: bool = False
    """Matrices of integers that have a kernel are not decoded."""
    alignment = BLOCK

    @property
    def num_bytes(self) -> int:
        return self.ends[-1]

    @property
    def chunk_ranges(self) -> list[list[tuple[int, int]]]:
        return [[(start, end)] for start, end in zip((0, *self.ends[:-1]), self.ends, strict=True)]

    @property
    def chunk_bytes(self) -> list[int]:
        return [end - start for [(start, end)] in self.chunk_ranges]

    @property
    def padding_ranges(self) -> list[tuple[int, int]]:
        """The bytes of a record that belong to no part: zero in every record."""
        after, ranges = 0, []
        for parts, end in zip(self.chunks, self.ends, strict=True):
            for part in parts:
                ranges.append((after, part.offset))
                after = part.offset + part.bytes_as(self.dtypes[part.parameter])
            ranges.append((after, end))
            after = end
        return [(start, end) for start, end in ranges if start < end]

    @property
    def parts(self) -> list[PackedPart]:
        return [part for chunk in self.chunks for part in chunk]

    @property
    def matrices(self) -> list[PackedPart]:
        """Parts of parameters with more than one dimension."""
        return [part for part in self.parts if len(self.shapes[part.parameter]) > 1]

    def is_view(self, part: PackedPart) -> bool:
        """Returns whether the part is used as it lies in the slot."""
        if part.coding == RAW:
            return True
        return self.uses_kernels and has_kernel(part.coding, self.shapes[part.parameter][-1])

    @property
    def views_are_weights(self) -> bool:
        return all(map(self.is_view, self.parts))

    @property
    def decoded_bytes(self) -> int:
        """Memory that `weights` needs in addition to the slot: parameters and a part's buffers."""
        coded = [part for part in self.parts if not self.is_view(part)]
        results = sum(
            math.prod(self.shapes[name]) * self.dtypes[name].itemsize
            for name in {part.parameter for part in coded}
        )
        buffers = (
            part.coding.scratch_bytes(part.num_weights, self.dtypes[part.parameter])
            for part in coded
        )
        return results + max(buffers, default=0)

    @cached_property
    def _plan(
        self,
    ) -> list[tuple[str, tuple[int, ...], torch.dtype, list[PackedPart], range | None]]:
        """Name, shape, dtype and parts of each parameter; its bytes where it lies as it is."""
        plan = []
        for name, shape in self.shapes.items():
            parts = [part for part in self.parts if part.parameter == name]
            dtype, start = self.dtypes[name], parts[0].offset
            plain = all(part.coding == RAW for part in parts)
            end = start + math.prod(shape) * dtype.itemsize
            plan.append((name, shape, dtype, parts, range(start, end) if plain else None))
        return plan

    def weights(self, slot: Tensor) -> ExpertWeights:
        """Return the expert's parameters from the slot's bytes `(num_bytes,)`.

        They are views of the slot, or new tensors where it holds integers that have to be decoded.
        """
        parameters: dict[str, Tensor | QuantisedMatrix] = {}
        for name, shape, dtype, parts, place in self._plan:
            if place is not None:
                parameters[name] = slot[place.start : place.stop].view(dtype).view(shape)
            elif all(map(self.is_view, parts)):
                rows = [
                    view_rows(part.coding, slot[part.offset :], part.num_weights, shape[-1], dtype)
                    for part in parts
                ]
                parameters[name] = QuantisedMatrix(rows)
            else:
                parameters[name] = self._decode(slot, shape, dtype, parts)
        return parameters

    def _decode(
        self, slot: Tensor, shape: tuple[int, ...], dtype: torch.dtype, parts: list[PackedPart]
    ) -> Tensor:
        weight = torch.empty(shape, dtype=dtype, device=slot.device)
        flat = weight.view(-1)
        for part in parts:
            target = flat[part.first : part.first + part.num_weights]
            decode(part.coding, slot[part.offset :], target, num_columns=shape[-1])
        return weight


def describe_packed(layouts: Sequence[PackedLayout]) -> str | None:
    """Returns why matrices of integers are decoded before each use; None if none is."""
    packed = [layout for layout in layouts if isinstance(layout, PackedLayout)]
    decoded = [part for layout in packed for part in layout.matrices if not layout.is_view(part)]
    if not decoded:
        return None
    reason = "this model, its device or this format has no kernel that is faster"
    if layouts[0].uses_kernels and any(
        part.coding.block not in (0, native_block()) for part in decoded
    ):
        reason = "it was packed for another processor: pack the model again on this one"
    return f"experts are decoded before each use, which takes longer than the product; {reason}"


def build_packed_layout(source: SlotLayout, *, coding: Coding = RAW) -> PackedLayout:
    """The source's chunks, each from block to block.

    A group size of 0 is a row. A matrix that cannot be stored in blocks is stored row by row.
    Parameters of one dimension, or that do not divide into groups, stay as they are.
    """
    assert not source.encoded, "records hold decoded weights, or integers of their own coding"
    chunks = [
        [Piece(name, first, n, _coding(coding, source, name, n)) for name, first, n in pieces]
        for pieces in _pieces(source)
    ]
    return lay_out(source.shapes, source.dtypes, chunks)


class Piece(NamedTuple):
    """Consecutive weights of a parameter that have no place yet."""

    parameter: str
    first: int
    num_weights: int
    coding: Coding


def lay_out(
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, torch.dtype],
    wanted: Sequence[Sequence[Piece]],
) -> PackedLayout:
    """Give every piece of the wanted chunks its place.

    Where weights as they are come in several chunks whose border is no multiple of a block (small
    or odd shapes), these become one chunk: the parameter's bytes must follow each other, and no
    read may begin between two blocks.
    """
    chunks: list[list[PackedPart]] = []
    ends: list[int] = []

    def end_of(part: PackedPart) -> int:
        return part.offset + part.bytes_as(dtypes[part.parameter])

    for pieces in wanted:
        follows = bool(chunks) and _follows(chunks[-1][-1], pieces[0])
        end = ends[-1] if ends else 0
        if follows and end_of(chunks[-1][-1]) % BLOCK:
            parts = chunks.pop()
            ends.pop()
            end = end_of(parts[-1])
        else:
            parts = []
        for piece in pieces:
            if parts and _follows(parts[-1], piece):
                last = parts.pop()
                num_weights = last.num_weights + piece.num_weights
                part = replace(last, num_weights=num_weights)
            else:
                part = PackedPart(*piece, align(end))
            parts.append(part)
            end = end_of(part)
        chunks.append(parts)
        ends.append(align(end, BLOCK))
    return PackedLayout(
        shapes=dict(shapes),
        dtypes=dict(dtypes),
        chunks=tuple(map(tuple, chunks)),
        ends=tuple(ends),
    )


def _follows(last: PackedPart, piece: Piece) -> bool:
    """Return whether the weights continue the part and must be adjacent to it."""
    return (
        piece.coding == last.coding == RAW
        and last.parameter == piece.parameter
        and last.first + last.num_weights == piece.first
    )


def _pieces(source: SlotLayout) -> Sequence[Sequence[tuple[str, int, int]]]:
    """Return parameter, first weight and number of weights of each chunk."""

    def piece(start: int, end: int) -> tuple[str, int, int]:
        name = max(
            (name for name, offset in source.offsets.items() if offset <= start),
            key=lambda name: source.offsets[name],
        )
        size = source.dtypes[name].itemsize
        return name, (start - source.offsets[name]) // size, (end - start) // size

    return [[piece(*bounds) for bounds in ranges] for ranges in source.chunk_ranges]


def _coding(wanted: Coding, source: SlotLayout, parameter: str, num_weights: int) -> Coding:
    shape = source.shapes[parameter]
    if wanted == RAW or len(shape) < 2:
        return RAW
    num_columns = shape[-1]
    wanted = replace(wanted, group_size=wanted.group_size or num_columns)
    num_rows, rest = divmod(num_weights, num_columns)
    if wanted.block and (rest or not fits(num_rows, num_columns, wanted.group_size)):
        wanted = replace(wanted, block=0)
    return RAW if num_weights % wanted.group_size else wanted
