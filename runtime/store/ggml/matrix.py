"""Matrices that are multiplied as they are stored, by ggml's kernels.

Activations are quantised, to eight bits for most types; products are summed in float32. Each row of
a result depends on its own row of the input alone (`products.c`).

Shape suffixes: T tokens, N rows, K columns.
"""

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.store.ggml.library import TYPES, find_products

own_threads: ContextVar[int] = ContextVar("own_threads", default=0)
"""Number of threads that multiply; 0: as many as PyTorch has. No bit depends on it."""


def count_threads() -> int:
    return own_threads.get() or torch.get_num_threads()


@dataclass(frozen=True)
class RowsPart:
    """Consecutive rows of one type."""

    kind: str
    offset: int
    """The first byte, from the address of the matrix or slot."""
    num_rows: int


class RowMatrix:
    """A matrix `(N, K)` of parts, at an address that each use gives."""

    def __init__(self, parts: Sequence[RowsPart], num_columns: int):
        self.parts = tuple((TYPES[p.kind].number, p.offset, p.num_rows) for p in parts)
        """As `products.c` reads them."""
        self.num_columns = num_columns
        self.num_rows = sum(part.num_rows for part in parts)

    def linear(self, stored: Tensor, x_TK: Tensor) -> Tensor:
        """Return `F.linear(x_TK, weight)` in float32, of weights that begin where `stored` does."""
        x_TK = x_TK.float().contiguous()
        return self.multiply([stored.data_ptr()], [list(range(len(x_TK)))], 1, x_TK)

    def multiply(
        self, addresses: list[int], pairs: list[list[int]], top_k: int, x_TK: Tensor
    ) -> Tensor:
        """Return products `(T * top_k, N)` of float32 rows; those of other pairs are undefined.

        Args:
            addresses: matrices like this one begin there.
            pairs: for each of them, the rows of the result: pair `t * top_k + k` is of row t.
        """
        products = find_products()
        assert products is not None
        y_PN = torch.empty(len(x_TK) * top_k, self.num_rows)
        products.multiply(
            self.parts,
            self.num_columns,
            addresses,
            pairs,
            top_k,
            len(x_TK),
            x_TK.data_ptr(),
            y_PN.data_ptr(),
            count_threads(),
        )
        return y_PN


@dataclass(frozen=True, slots=True)
class QuantisedExpert:
    """An expert that is multiplied where it lies in its slot."""

    slot: Tensor
    """uint8; keeps the memory."""
    address: int
    matrices: Mapping[str, RowMatrix]
    """By name of the parameter; the same for all experts of a layer."""
    tensors: Mapping[str, Tensor]
    """The other parameters: biases."""


ExpertWeights = Mapping[str, Tensor] | QuantisedExpert
"""The parameters of an expert that is ready to be computed."""
