"""Encodes weights as they are, or as integers with a scale (and a zero) for each group.

A group is `group_size` consecutive weights, row by row. The formulas are all there is to reading:

    int8   w = q * scale             q int8
    int4   w = (q - zero) * scale    q 0..15, two to a byte

Scales and zeros are in the weights' own dtype; or, if groups form meta groups (`hqq`), bytes u of
which four float32 numbers of the meta group make the value:

    scale = u * a + b                zero = u * c + d

Of G groups, the low halves of the int4 bytes hold the first ceil(G / 2), the high halves the
others. Arithmetic is in float32, operation by operation, and rounded once to the weights' dtype.

Matrices in `blocks` (`runtime.store.packed.blocks`) have another formula and another order. These,
and int8 with one group for each row, are multiplied as they are stored
(`runtime.store.packed.matrix`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.store.layout import align
from runtime.store.packed.blocks import decode_blocks, to_blocks

META_BYTES = 16
"""Four float32 numbers of each meta group."""
BLOCK_GROUP_BYTES = 4
"""Scale and offset of a group of a matrix in blocks, bfloat16."""

STEP = 1 << 18
"""Weights that are decoded at once: a megabyte as float32. Fewer cost calls, more the cache; on one
core 4 GB/s of bf16 weights from int8 and 3 from int4, where all at once gave 1.7 and 1."""


@dataclass(frozen=True)
class Coding:
    bits: int
    """8 or 4; 0: weights as they are."""
    group_size: int = 0
    """0: a row."""
    meta_group_size: int = 0
    """Groups whose scales and zeros are bytes with a common scale and offset, of int4; 0:
    scales and zeros are stored as they are."""
    block: int = 0
    """Rows of a block of int4 (`runtime.store.packed.blocks`); 0: weights row by row."""

    @property
    def packs(self) -> bool:
        return self.bits == 4

    def halves(self, num_weights: int) -> int:
        """Weights in the low halves of int4 bytes: those of half the groups, rounded up."""
        return -(-num_weights // (2 * self.group_size)) * self.group_size

    def meta_groups(self, num_groups: int) -> int:
        return -(-num_groups // self.meta_group_size)

    def sections(self, num_weights: int, dtype: torch.dtype) -> list[tuple[int, int]]:
        """`(start, end)` in bytes of the weights alone; or of integers, scales, zeros and meta."""
        if not self.bits:
            return [(0, num_weights * dtype.itemsize)]
        groups = num_weights // self.group_size
        size = self.halves(num_weights) if self.packs else num_weights
        if self.block:
            sizes = [num_weights // 2, groups * BLOCK_GROUP_BYTES]
        elif self.meta_group_size:
            sizes = [size, groups, groups, self.meta_groups(groups) * META_BYTES]
        else:
            sizes = [size] + [groups * dtype.itemsize] * (1 + self.packs)
        found, start = [], 0
        for size in sizes:
            found.append((start, start + size))
            start = align(start + size)
        return found

    def scratch_bytes(self, num_weights: int, dtype: torch.dtype) -> int:
        """Memory that `decode` needs in addition to its result, as float32."""
        if not self.bits:
            return 0
        if self.block:
            # The integers, two copies of half of them, and the weights in float32.
            return 6 * num_weights + 2 * BLOCK_GROUP_BYTES * (num_weights // self.group_size)
        # Of meta groups, each scale and zero is made of two numbers.
        per_group = 6 if self.meta_group_size else 1 + self.packs
        groups = num_weights // self.group_size * 4 * per_group
        step = min(max(1, STEP // self.group_size) * self.group_size, num_weights)
        return groups + step // 2 * self.packs + (dtype != torch.float32) * step * 4

    def num_bytes(self, num_weights: int, dtype: torch.dtype) -> int:
        return self.sections(num_weights, dtype)[-1][1]


RAW = Coding(0)


@dataclass(frozen=True)
class Integers:
    """A part's weights as integers. Shapes: n weights, g groups."""

    values: Tensor
    """uint8 0..15 or int8, `(n,)`."""
    scales: Tensor
    """`(g,)`, in the weights' dtype, or uint8."""
    zeros: Tensor | None
    """`(g,)`, as the scales; none for int8."""
    meta: Tensor | None = None
    """`(m, 4)` float32: scale and offset of the scales, scale and offset of the zeros."""

    def group_values(self, coding: Coding) -> list[Tensor]:
        """Returns scales and, of int4, zeros as float32, `(g,)` each."""
        values = [self.scales.float(), *([] if self.zeros is None else [self.zeros.float()])]
        if self.meta is None:
            return values
        numbers = self.meta.repeat_interleave(coding.meta_group_size, 0)[: len(self.scales)].T
        for value, scale, offset in zip(values, numbers[::2], numbers[1::2], strict=True):
            value.mul_(scale).add_(offset)
        return values


def encode(coding: Coding, integers: Integers, stored: Tensor, *, num_columns: int = 0) -> None:
    """Lays a part out in `stored`, uint8, which begins where the part does.

    A part in blocks consists of whole rows of `num_columns`.
    """
    num_weights, dtype = integers.values.numel(), integers.scales.dtype
    sections = [stored[a:b] for a, b in coding.sections(num_weights, dtype)]
    if coding.block:
        assert integers.zeros is not None
        sections[0].copy_(to_blocks(integers.values.view(-1, num_columns), coding.block))
        pairs = torch.stack([integers.scales, integers.zeros], dim=-1)
        pairs_NG2 = pairs.view(-1, num_columns // coding.group_size, 2)
        sections[1].view(torch.bfloat16).copy_(pairs_NG2.transpose(0, 1).reshape(-1))
        return
    if coding.packs:
        half = sections[0].numel()
        sections[0].copy_(integers.values[:half])
        sections[0][: num_weights - half] |= integers.values[half:] << 4
        assert integers.zeros is not None
        sections[2].view(dtype).copy_(integers.zeros)
    else:
        sections[0].view(torch.int8).copy_(integers.values)
    sections[1].view(dtype).copy_(integers.scales)
    if integers.meta is not None:
        sections[3].view(torch.float32).copy_(integers.meta.view(-1))


def _read_groups(coding: Coding, sections: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Returns scales and, of int4, zeros as float32, `(g, 1)` each."""
    meta = None
    if coding.meta_group_size:
        dtype, meta = torch.uint8, sections[3].view(torch.float32).view(-1, 4)
    scales, *zeros = (section.view(dtype) for section in sections[1:3])
    integers = Integers(sections[0], scales, zeros[0] if zeros else None, meta)
    return [value[:, None] for value in integers.group_values(coding)]


def read_pairs(sections: list[Tensor], num_columns: int, coding: Coding) -> Tensor:
    """Returns scales and offsets of a matrix in blocks, `[groups of a row, rows, 2]`."""
    return sections[1].view(torch.bfloat16).view(num_columns // coding.group_size, -1, 2)


def decode(coding: Coding, stored: Tensor, target: Tensor, *, num_columns: int = 0) -> None:
    """Fills `target` `(n,)` with the weights of a part that begins where `stored`, uint8, does."""
    num_weights, dtype = target.numel(), target.dtype
    sections = [stored[a:b] for a, b in coding.sections(num_weights, dtype)]
    if not coding.bits:
        target.copy_(sections[0].view(dtype))
        return
    if coding.block:
        shape = num_weights // num_columns, num_columns
        pairs_GN2 = read_pairs(sections, num_columns, coding)
        target.copy_(decode_blocks(sections[0], pairs_GN2, shape, coding.block).view(-1))
        return
    num_groups, size = num_weights // coding.group_size, coding.group_size
    integers = sections[0].view(-1, size)
    scales, *zeros = _read_groups(coding, sections, dtype)
    groups = target.view(num_groups, size)
    half, step = len(integers), max(1, STEP // size)
    # In float32 the target is its own scratch; to other dtypes the result is rounded at the end.
    scratch = None
    if dtype != torch.float32:
        scratch = torch.empty((min(step, num_groups), size), device=target.device)
    for start in range(0, num_groups, step):
        end = min(start + step, num_groups)
        made = groups[start:end] if scratch is None else scratch[: end - start]
        if coding.packs:
            middle = min(max(start, half), end)
            high = integers[max(middle, half) - half : max(end, half) - half]
            torch.bitwise_and(integers[start:middle], 15, out=made[: middle - start])
            torch.bitwise_right_shift(high, 4, out=made[middle - start :])
            made -= zeros[0][start:end]
        else:
            made.copy_(integers[start:end].view(torch.int8))
        made *= scales[start:end]
        if scratch is not None:
            groups[start:end] = made
