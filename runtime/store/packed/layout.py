"""The layout of a packed store's records, made of the layout that a checkpoint's experts have."""

import math
from dataclasses import replace

from runtime.store.ggml.library import TYPES
from runtime.store.layout import ExpertLayout, Part, Piece, lay_out
from runtime.store.packed.coding import HQQ, RAW, Coding

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
