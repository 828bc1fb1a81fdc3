"""Matrices of integers that are multiplied as they are stored, without being decoded.

PyTorch has the kernels for CPUs: integers become bfloat16 in registers, products are summed in
float32. Each row of the result depends on its own row of the input alone, so that the same token
gives the same bits in every batch (tests/unit/runtime/store/test_matrix.py).

Shape suffixes: T tokens, N rows, K columns, G groups of a row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.store.ggml.matrix import QuantisedExpert
from runtime.store.packed.coding import Coding, read_pairs

_INT4 = torch.ops.aten._weight_int4pack_mm_for_cpu
_INT8 = torch.ops.aten._weight_int8pack_mm


@dataclass(frozen=True, slots=True)
class Int4Rows:
    """Rows in blocks (`runtime.store.packed.blocks`)."""

    integers: Tensor
    """uint8 `(N, K / 2)`."""
    pairs_GN2: Tensor
    """Scale and offset of each group, bfloat16."""
    group_size: int

    def multiply(self, x_TK: Tensor) -> Tensor:
        return _INT4(x_TK, self.integers, self.group_size, self.pairs_GN2)


@dataclass(frozen=True, slots=True)
class Int8Rows:
    """Rows with a scale each."""

    integers: Tensor
    """int8 `(N, K)`."""
    scales_N: Tensor

    def multiply(self, x_TK: Tensor) -> Tensor:
        return _INT8(x_TK, self.integers, self.scales_N.bfloat16())


class QuantisedMatrix:
    """A parameter `(N, K)`, of which each part holds some rows."""

    def __init__(self, parts: Sequence[Int4Rows | Int8Rows]):
        self._parts = parts

    @property
    def device(self) -> torch.device:
        return self._parts[0].integers.device

    def linear(self, x_TK: Tensor) -> Tensor:
        """Returns `F.linear(x_TK, weight)` in the dtype of `x_TK`, computed in bfloat16."""
        rounded_TK = x_TK.bfloat16().contiguous()
        outputs = [part.multiply(rounded_TK) for part in self._parts]
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)).to(x_TK.dtype)


ExpertWeights = Mapping[str, Tensor | QuantisedMatrix] | QuantisedExpert
"""The parameters of an expert that is ready to be computed."""


def view_rows(
    coding: Coding, stored: Tensor, num_weights: int, num_columns: int, dtype: torch.dtype
) -> Int4Rows | Int8Rows:
    """Returns a part that begins where `stored`, uint8, does, as views of it."""
    sections = [stored[a:b] for a, b in coding.sections(num_weights, dtype)]
    num_rows = num_weights // num_columns
    if coding.block:
        integers = sections[0].view(num_rows, num_columns // 2)
        return Int4Rows(integers, read_pairs(sections, num_columns, coding), coding.group_size)
    integers = sections[0].view(torch.int8).view(num_rows, num_columns)
    return Int8Rows(integers, sections[1].view(dtype))
