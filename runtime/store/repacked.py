"""Experts of a checkpoint whose own format nothing computes with, repacked as they are read.

Integers stay integers: a slot holds them in the order of the kernels that multiply them
(`runtime.store.packed`), whatever the order in the file.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from runtime.store.base import READERS, ExpertStore
from runtime.store.files import FileReader
from runtime.store.packed.coding import RAW, Coding, Integers, encode
from runtime.store.packed.layout import PackedLayout, Piece, lay_out

ORDERING_BYTES = 2
"""Memory for each weight that `to_blocks` takes."""


@dataclass(frozen=True)
class ForeignRows(ABC):
    """Consecutive rows of a parameter, of every expert of a layer, as a file has them."""

    parameter: str
    first: int
    """Index of the first weight, row by row."""
    num_weights: int
    coding: Coding
    """Coding of the rows in a slot; `RAW` is weights in the parameter's dtype."""

    @abstractmethod
    def read(self, expert: int) -> Integers | Tensor:
        """Return integers for the coding; or the weights, in any shape and dtype, if it is `RAW`.

        Thread-safe.

        Raises:
            TransferError: the bytes did not arrive.
        """

    @property
    @abstractmethod
    def scratch_bytes(self) -> int:
        """Memory that a `read` takes, its result included."""


@dataclass(frozen=True)
class ForeignLayer:
    """A layer's parameters, and the rows that they consist of, in order."""

    shapes: Mapping[str, tuple[int, ...]]
    """Shapes of one expert's parameters."""
    dtypes: Mapping[str, torch.dtype]
    rows: Sequence[ForeignRows]
    num_experts: int

    def chunks(self) -> list[list[ForeignRows]]:
        """One chunk for each matrix of the file (ProMoE, section 5.1), with the biases after it."""
        chunks: list[list[ForeignRows]] = []
        for rows in self.rows:
            if len(self.shapes[rows.parameter]) == 1 and chunks:
                chunks[-1].append(rows)
            else:
                chunks.append([rows])
        return chunks


class RepackedStore(ExpertStore):
    """Reads chunks of experts and repacks them into slots. Thread-safe."""

    layouts: list[PackedLayout]

    def __init__(
        self, layers: Sequence[ForeignLayer], files: FileReader, *, uses_kernels: bool = False
    ):
        self._files = files
        self._rows = [{(r.parameter, r.first): r for r in layer.rows} for layer in layers]
        self.layouts = [
            replace(
                lay_out(
                    layer.shapes,
                    layer.dtypes,
                    [
                        [Piece(r.parameter, r.first, r.num_weights, r.coding) for r in rows]
                        for rows in layer.chunks()
                    ],
                ),
                uses_kernels=uses_kernels,
            )
            for layer in layers
        ]
        self.experts_per_layer = [layer.num_experts for layer in layers]
        self.scratch_bytes = READERS * max(
            rows.scratch_bytes + ORDERING_BYTES * rows.num_weights * (rows.coding.block > 0)
            for layer in layers
            for rows in layer.rows
        )

    def read(self, layer: int, expert: int, chunks: range, slot: Tensor) -> None:
        layout = self.layouts[layer]
        for part in (part for chunk in chunks for part in layout.chunks[chunk]):
            # Weights as they are of several rows may have become one part.
            at, end = part.first, part.first + part.num_weights
            while at < end:
                rows = self._rows[layer][part.parameter, at]
                values = rows.read(expert)
                if part.coding == RAW:
                    assert isinstance(values, Tensor)
                    dtype = layout.dtypes[part.parameter]
                    start = part.offset + (at - part.first) * dtype.itemsize
                    target = slot[start : start + rows.num_weights * dtype.itemsize].view(dtype)
                    target.copy_(values.reshape(-1))
                else:
                    assert isinstance(values, Integers)
                    num_columns = layout.shapes[part.parameter][-1]
                    encode(part.coding, values, slot[part.offset :], num_columns=num_columns)
                at += rows.num_weights
