"""The layout of an expert's record, the same in the file and in the slot.

A record consists of chunks that begin and end on a block, so that each is one direct read from the
file into the slot. Weights have the model's order, so that the slot holds the parameters; or they
are quantised rows, which `weights` leaves as they are for kernels that multiply them
(`runtime.store.ggml`), or decodes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from runtime.store.files import BLOCK
from runtime.store.ggml.library import PLAIN_KINDS, TYPES, explain_missing, multiplies
from runtime.store.ggml.matrix import ExpertWeights, QuantisedExpert, RowMatrix, RowsPart
from runtime.store.layout import SlotLayout, align
from runtime.store.packed.coding import HQQ, RAW, Coding, decode


@dataclass(frozen=True)
class PackedPart:
    """Consecutive weights of a parameter that travel in one chunk."""

    parameter: str
    first: int
    """Index of the first weight, row by row."""
    num_weights: int
    coding: Coding
    offset: int
    """Offset of the first byte in the slot."""

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
    """Quantised matrices are multiplied as they are stored, where there are products."""
    reads_parts: bool = False
    """Each part is read for itself, from a file that has no record; else each chunk."""
    alignment = BLOCK

    @property
    def num_bytes(self) -> int:
        return self.ends[-1]

    @property
    def chunk_ranges(self) -> list[list[tuple[int, int]]]:
        if self.reads_parts:
            return [[self._range(part) for part in chunk] for chunk in self.chunks]
        return [[(start, end)] for start, end in zip((0, *self.ends[:-1]), self.ends, strict=True)]

    @property
    def chunk_bytes(self) -> list[int]:
        return [sum(end - start for start, end in ranges) for ranges in self.chunk_ranges]

    def _range(self, part: PackedPart) -> tuple[int, int]:
        return part.offset, part.offset + part.bytes_as(self.dtypes[part.parameter])

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

    @cached_property
    def row_matrices(self) -> dict[str, RowMatrix] | None:
        """The matrices that are multiplied as they lie in the slot; None where others are."""
        kinds = {part.coding.kind for part in self.matrices}
        if not self.uses_kernels or not any(kinds) or HQQ in kinds:
            return None
        found: dict[str, list[RowsPart]] = {}
        for part in self.matrices:
            num_columns = self.shapes[part.parameter][-1]
            kind = part.coding.kind or PLAIN_KINDS.get(self.dtypes[part.parameter], "")
            num_rows, rest = divmod(part.num_weights, num_columns)
            if rest or num_columns % TYPES[kind].block or not multiplies(kind):
                return None
            found.setdefault(part.parameter, []).append(RowsPart(kind, part.offset, num_rows))
        return {name: RowMatrix(parts, self.shapes[name][-1]) for name, parts in found.items()}

    @property
    def views_are_weights(self) -> bool:
        return self.row_matrices is not None or all(part.coding == RAW for part in self.parts)

    @property
    def decoded_bytes(self) -> int:
        """Memory that `weights` needs in addition to the slot: parameters and a part's buffers."""
        if self.views_are_weights:
            return 0
        coded = [part for part in self.parts if part.coding != RAW]
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
            if self.row_matrices is not None and name in self.row_matrices:
                continue
            parts = [part for part in self.parts if part.parameter == name]
            dtype, start = self.dtypes[name], parts[0].offset
            plain = all(part.coding == RAW for part in parts)
            end = start + math.prod(shape) * dtype.itemsize
            plan.append((name, shape, dtype, parts, range(start, end) if plain else None))
        return plan

    def weights(self, slot: Tensor) -> ExpertWeights:
        """Return the expert's parameters from the slot's bytes `(num_bytes,)`.

        They are views of the slot, or new tensors where it holds something that has to be decoded.
        """
        parameters = {}
        for name, shape, dtype, parts, place in self._plan:
            if place is not None:
                parameters[name] = slot[place.start : place.stop].view(dtype).view(shape)
            else:
                parameters[name] = self._decode(slot, shape, dtype, parts)
        if self.row_matrices is None:
            return parameters
        return QuantisedExpert(slot, slot.data_ptr(), self.row_matrices, parameters)

    def _decode(
        self, slot: Tensor, shape: tuple[int, ...], dtype: torch.dtype, parts: list[PackedPart]
    ) -> Tensor:
        weight = torch.empty(shape, dtype=dtype, device=slot.device)
        flat = weight.view(-1)
        for part in parts:
            target = flat[part.first : part.first + part.num_weights]
            decode(part.coding, slot[part.offset :], target)
        return weight


def describe_packed(layouts: Sequence[PackedLayout]) -> str | None:
    """Returns why quantised matrices are decoded before each use; None if none is."""
    decoded = [layout for layout in layouts if not layout.views_are_weights]
    if not decoded:
        return None
    if any(part.coding.kind == HQQ for part in decoded[0].parts):
        reason = "hqq has no kernel"
    elif not decoded[0].uses_kernels:
        reason = "this model or its device has no kernels for them"
    else:
        reason = explain_missing() or "ggml has no kernel for one of their types"
    return f"experts are decoded before each use, which takes longer than the product; {reason}"


def build_packed_layout(source: SlotLayout, *, coding: Coding = RAW) -> PackedLayout:
    """The source's chunks, each from block to block.

    A matrix whose rows are no whole blocks takes the next type of smaller blocks (`SMALLER`).
    Parameters of one dimension, or whose rows do not divide into any, stay as they are.
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


SMALLER = {
    **{"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q4_1", "Q5_K": "Q8_0", "Q6_K": "Q8_0"},
    **{"IQ4_XS": "IQ4_NL"},
}
"""Types of blocks of 32 weights in place of those of 256: of no more loss, decoded by PyTorch on
every device."""


def choose_kind(kind: str, num_columns: int) -> str:
    """Return a GGUF type for rows of this length; empty if there is none."""
    while kind and num_columns % TYPES[kind].block:
        kind = SMALLER.get(kind, "")
    return kind


def _coding(wanted: Coding, source: SlotLayout, parameter: str, num_weights: int) -> Coding:
    shape = source.shapes[parameter]
    if wanted == RAW or len(shape) < 2:
        return RAW
    if wanted.kind == HQQ:
        return RAW if num_weights % wanted.group_size else wanted
    return RAW if num_weights % shape[-1] else Coding(choose_kind(wanted.kind, shape[-1]))
