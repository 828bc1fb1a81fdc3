"""The layout of an expert in a slot: parts of its parameters, each a range, a coding and an offset.

The parts come in chunks (ProMoE, section 5.1: one for each linear layer), which are moved one by
one. Weights have the model's order, so that the slot holds the parameters; or they are quantised
rows, which `weights` leaves as they are for kernels that multiply them (`runtime.store.ggml`), or
decodes. A packed store's records have this layout, from block to block; its manifest is the layout
in JSON.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from runtime.store.files import ALIGNMENT, BLOCK, align
from runtime.store.ggml.library import PLAIN_KINDS, TYPES, multiplies
from runtime.store.ggml.matrix import ExpertWeights, QuantisedExpert, RowMatrix, RowsPart
from runtime.store.packed.coding import HQQ, RAW, STORED, Coding, decode


@dataclass(frozen=True)
class Piece:
    """Consecutive weights of a parameter that travel together."""

    parameter: str
    first: int
    """Index of the first weight, row by row; of stored tensors, of the first number of them all."""
    num_weights: int
    coding: Coding


@dataclass(frozen=True)
class Part(Piece):
    """A piece and its place in the slot, in bytes."""

    offset: int
    num_bytes: int

    @property
    def end(self) -> int:
        return self.offset + self.num_bytes


@dataclass(frozen=True)
class Decoder:
    """Steps that make a parameter of its stored tensors."""

    decode: Callable[[list[Tensor]], Tensor]
    """Takes the tensors in order, on their device."""
    decoding_bytes: int
    """Memory that `decode` takes, its result included."""


@dataclass(frozen=True)
class ExpertLayout:
    """The layout of a slot, the same for every expert of a layer."""

    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, torch.dtype]
    chunks: tuple[tuple[Part, ...], ...]
    ends: tuple[int, ...]
    """End of each chunk in bytes."""
    block: int = BLOCK
    """Chunks begin and end at multiples of it: where it is that of a disk, each is one direct read
    from a record of a packed store, which has the same layout. 1: each part is read for itself,
    from files that have no record."""
    decoders: Mapping[str, Decoder] = field(default_factory=dict)
    """By parameter that consists of stored tensors."""
    uses_kernels: bool = False
    """Quantised matrices are multiplied as they are stored, where there are products."""
    is_flipped: bool = False
    """Matrices are the transposed ones of the model's: rows as kernels multiply them."""

    @property
    def num_bytes(self) -> int:
        return align(self.ends[-1])

    @property
    def alignment(self) -> int:
        return max(self.block, ALIGNMENT)

    @property
    def chunk_ranges(self) -> list[list[tuple[int, int]]]:
        """Each chunk's parts of the slot that are read at once, as `(start, end)` bytes."""
        if self.block == 1:
            return [[(part.offset, part.end) for part in chunk] for chunk in self.chunks]
        return [[(start, end)] for start, end in zip((0, *self.ends[:-1]), self.ends, strict=True)]

    @property
    def chunk_bytes(self) -> list[int]:
        return [sum(end - start for start, end in ranges) for ranges in self.chunk_ranges]

    @property
    def padding_ranges(self) -> list[tuple[int, int]]:
        """The bytes of a record that belong to no part: zero in every record."""
        after, ranges = 0, []
        for parts, end in zip(self.chunks, self.ends, strict=True):
            for part in parts:
                ranges.append((after, part.offset))
                after = part.end
            ranges.append((after, end))
            after = end
        return [(start, end) for start, end in ranges if start < end]

    @property
    def parts(self) -> list[Part]:
        return [part for chunk in self.chunks for part in chunk]

    @property
    def matrices(self) -> list[Part]:
        """Parts of parameters with more than one dimension."""
        return [part for part in self.parts if len(self.shapes[part.parameter]) > 1]

    @cached_property
    def row_matrices(self) -> dict[str, RowMatrix] | None:
        """The matrices that are multiplied as they lie in the slot; None where others are."""
        kinds = {part.coding.kind for part in self.matrices}
        if not self.uses_kernels or not any(kinds) or not kinds <= {RAW.kind, *TYPES}:
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
    def is_plain(self) -> bool:
        """Whether a slot holds the weights themselves."""
        return all(part.coding == RAW for part in self.parts)

    @cached_property
    def views_are_weights(self) -> bool:
        return self.row_matrices is not None or self.is_plain

    @property
    def decoded_bytes(self) -> int:
        """Memory that `weights` needs in addition to the slot: parameters and a part's buffers."""
        if self.views_are_weights:
            return 0
        results = {
            name: math.prod(self.shapes[name]) * self.dtypes[name].itemsize
            for name in {part.parameter for part in self.parts if part.coding != RAW}
        }
        buffers = [one.decoding_bytes - results[name] for name, one in self.decoders.items()]
        for part in self.parts:
            dtype = self.dtypes[part.parameter]
            buffers.append(part.coding.scratch_bytes(part.num_weights, dtype))
        return sum(results.values()) + max(buffers)

    @cached_property
    def _makers(self) -> dict[str, Callable[[Tensor], Tensor]]:
        """Steps that make each parameter of a slot, but for matrices multiplied where they lie."""
        makers: dict[str, Callable[[Tensor], Tensor]] = {}
        for name, shape in self.shapes.items():
            if self.row_matrices is not None and name in self.row_matrices:
                continue
            parts, dtype = [p for p in self.parts if p.parameter == name], self.dtypes[name]
            if name in self.decoders:
                makers[name] = partial(_decode_stored, self.decoders[name], parts)
            elif all(part.coding == RAW for part in parts):
                makers[name] = partial(_view, parts[0].offset, shape, dtype)
            else:
                makers[name] = partial(_decode_parts, parts, shape, dtype)
        return makers

    def weights(self, slot: Tensor) -> ExpertWeights:
        """Return the expert's parameters from the slot's bytes `(num_bytes,)`.

        They are views of the slot, or new tensors where it holds something that has to be decoded.
        """
        parameters = {name: make(slot) for name, make in self._makers.items()}
        if self.row_matrices is None:
            return parameters
        return QuantisedExpert(slot, slot.data_ptr(), self.row_matrices, parameters)


def _view(offset: int, shape: tuple[int, ...], dtype: torch.dtype, slot: Tensor) -> Tensor:
    size = math.prod(shape) * dtype.itemsize
    return slot[offset : offset + size].view(dtype).view(shape)


def _decode_stored(decoder: Decoder, parts: Sequence[Part], slot: Tensor) -> Tensor:
    codings = [(part.offset, part.coding) for part in parts]
    return decoder.decode(
        [_view(at, how.shape, how.dtype, slot) for at, how in codings if how.dtype is not None]
    )


def _decode_parts(
    parts: Sequence[Part], shape: tuple[int, ...], dtype: torch.dtype, slot: Tensor
) -> Tensor:
    weight = torch.empty(shape, dtype=dtype, device=slot.device)
    flat = weight.view(-1)
    for part in parts:
        target = flat[part.first : part.first + part.num_weights]
        decode(part.coding, slot[part.offset :], target)
    return weight


def group_chunks(
    pieces: Sequence[Piece], shapes: Mapping[str, tuple[int, ...]]
) -> list[list[Piece]]:
    """Return a chunk for each piece; biases, and all tensors of a `Decoder`, travel with others."""
    chunks: list[list[Piece]] = []
    for piece in pieces:
        is_more = piece.coding.kind == STORED and piece.first > 0
        if chunks and (is_more or len(shapes[piece.parameter]) == 1):
            chunks[-1].append(piece)
        else:
            chunks.append([piece])
    return chunks


def lay_out(
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, torch.dtype],
    wanted: Sequence[Sequence[Piece]],
    *,
    block: int = BLOCK,
) -> ExpertLayout:
    """Give every piece of the wanted chunks its place.

    Where weights as they are come in several chunks whose border is no multiple of a block (small
    or odd shapes), these become one chunk: the parameter's bytes must follow each other, and no
    read may begin between two blocks.
    """
    chunks: list[list[Part]] = []
    last: Part | None = None
    end = 0
    for pieces in wanted:
        if last is None or not _follows(last, pieces[0]) or not end % block:
            chunks.append([])
            end = align(end, block)
        for piece in pieces:
            offset = end if last is not None and _follows(last, piece) else align(end)
            size = piece.coding.num_bytes(piece.num_weights, dtypes[piece.parameter])
            last = Part(piece.parameter, piece.first, piece.num_weights, piece.coding, offset, size)
            chunks[-1].append(last)
            end = last.end
    return ExpertLayout(
        shapes=dict(shapes),
        dtypes=dict(dtypes),
        chunks=tuple(map(tuple, chunks)),
        ends=tuple(align(parts[-1].end, block) for parts in chunks),
        block=block,
    )


def _follows(last: Piece, piece: Piece) -> bool:
    """Return whether the weights continue the others and must be adjacent to them."""
    return (
        piece.coding == last.coding == RAW
        and last.parameter == piece.parameter
        and last.first + last.num_weights == piece.first
    )


SMALLER = {
    **{"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q4_1", "Q5_K": "Q8_0", "Q6_K": "Q8_0"},
    **{"IQ4_XS": "IQ4_NL"},
}
"""Types of blocks of 32 weights in place of those of 256: of no more loss, decoded by PyTorch on
every device."""


def build_packed_layout(
    source: ExpertLayout, *, coding: Coding = RAW, flips: bool = False
) -> ExpertLayout:
    """The source's chunks, each from block to block.

    Without a coding, parts keep their own. A matrix whose rows are no whole blocks takes the next
    type of smaller blocks (`SMALLER`). Parameters of one dimension, or whose rows do not divide
    into any, stay as they are.

    Args:
        flips: the model has `(inputs, outputs)` matrices, which kernels do not multiply: rows of a
            GGUF type are those of the transposed ones, where a whole matrix comes at once.
    """
    assert not source.decoders, "records hold decoded weights, or integers of their own coding"

    shapes = source.shapes
    is_whole = all(
        part.num_weights == math.prod(shapes[part.parameter]) for part in source.matrices
    )
    is_flipped = flips and is_whole and coding.kind in TYPES
    if is_flipped:
        shapes = {name: shape[::-1] for name, shape in shapes.items()}

    def recode(part: Part) -> Piece:
        own = part.coding
        if coding != RAW:
            own = _choose_coding(coding, shapes[part.parameter], part.num_weights)
        return Piece(part.parameter, part.first, part.num_weights, own)

    chunks = [[recode(part) for part in chunk] for chunk in source.chunks]
    return replace(lay_out(shapes, source.dtypes, chunks), is_flipped=is_flipped)


def _choose_coding(wanted: Coding, shape: tuple[int, ...], num_weights: int) -> Coding:
    if len(shape) < 2:
        return RAW
    if wanted.kind == HQQ:
        return RAW if num_weights % wanted.group_size else wanted
    return RAW if num_weights % shape[-1] else Coding(choose_kind(wanted.kind, shape[-1]))


def choose_kind(kind: str, num_columns: int) -> str:
    """Return a GGUF type for rows of this length; empty if there is none."""
    while kind and num_columns % TYPES[kind].block:
        kind = SMALLER.get(kind, "")
    return kind


RECOMMENDED = {"int8": "Q8_0", "int4": "Q4_K"}
"""The types with the least loss for their size that every device decodes."""


def name_kind(wanted: str) -> str:
    """Return the GGUF type that an option names, such as `q4_K`, or that is recommended for it."""
    return RECOMMENDED.get(wanted, wanted.upper())
