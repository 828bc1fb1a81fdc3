"""Experts of a checkpoint whose rows are quantised: slots hold them as ggml's kernels take them.

Rows of a GGUF file are read as they are; integers of other formats are put in GGUF's blocks.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from runtime.store.base import READERS, ExpertStore
from runtime.store.files import FileRange, FileReader
from runtime.store.packed.coding import Coding
from runtime.store.packed.layout import PackedLayout, Piece, lay_out


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
    def read(self, expert: int, target: Tensor) -> None:
        """Fill the rows' bytes in a slot, uint8. Thread-safe.

        Raises:
            TransferError: the bytes did not arrive, or are damaged.
        """

    def place(self, expert: int) -> FileRange | None:  # noqa: ARG002
        """Return where a file has these bytes as they are; None: `read` makes them."""
        return None

    @property
    @abstractmethod
    def scratch_bytes(self) -> int:
        """Memory that a `read` takes in addition to the slot."""


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
    """Reads chunks of quantised experts into slots. Thread-safe."""

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
                reads_parts=True,
            )
            for layer in layers
        ]
        self.experts_per_layer = [layer.num_experts for layer in layers]
        rows = (rows for layer in layers for rows in layer.rows)
        self.scratch_bytes = READERS * max(one.scratch_bytes for one in rows)

    def read(self, layer: int, expert: int, chunks: range, slot: Tensor) -> None:
        for chunk in chunks:
            for rows, start, end in self._places(layer, chunk):
                rows.read(expert, slot[start:end])

    def extents(self, layer: int, expert: int) -> list[FileRange] | None:
        found = []
        for chunk in range(len(self.layouts[layer].chunks)):
            places = list(self._places(layer, chunk))
            if len(places) != len(self.layouts[layer].chunks[chunk]):
                return None  # several rows have become one part
            for rows, _, _ in places:
                if (place := rows.place(expert)) is None:
                    return None
                found.append(place)
        return found

    def _places(self, layer: int, chunk: int) -> list[tuple[ForeignRows, int, int]]:
        """Return a chunk's rows, and where their bytes begin and end in the slot."""
        layout, found = self.layouts[layer], []
        for part in layout.chunks[chunk]:
            # Weights as they are of several rows may have become one part.
            at, start = part.first, part.offset
            while at < part.first + part.num_weights:
                rows = self._rows[layer][part.parameter, at]
                end = start + rows.coding.num_bytes(rows.num_weights, layout.dtypes[part.parameter])
                found.append((rows, start, end))
                at, start = at + rows.num_weights, end
        return found
