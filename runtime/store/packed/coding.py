"""How weights are stored: as they are, or as integers with a scale (and a zero) for each group.

A group is `group_size` consecutive weights, row by row. The formulas are all there is to reading:

    int8   w = q * scale             q int8
    int4   w = (q - zero) * scale    q 0..15, two to a byte; zero need not be whole

Scales and zeros are in the weights' own dtype. Of a part of n weights, byte i of the int4 integers
holds weight i in its low half and weight i + n/2 in its high half. Arithmetic is in the weights'
dtype, step by step, so that the result is one and the same on every device.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.store.layout import ALIGNMENT


@dataclass(frozen=True)
class Coding:
    bits: int
    """8 or 4; 0: weights as they are."""
    group_size: int = 0

    @property
    def packs(self) -> bool:
        """Whether two integers share a byte."""
        return self.bits == 4

    def sections(self, num_weights: int, dtype: torch.dtype) -> list[tuple[int, int]]:
        """`(start, end)` in bytes of the weights alone; or of integers, scales and zeros."""
        if not self.bits:
            return [(0, num_weights * dtype.itemsize)]
        groups = num_weights // self.group_size * dtype.itemsize
        sizes = [num_weights * self.bits // 8, groups] + [groups] * self.packs
        found, start = [], 0
        for size in sizes:
            found.append((start, start + size))
            start = math.ceil((start + size) / ALIGNMENT) * ALIGNMENT
        return found

    def num_bytes(self, num_weights: int, dtype: torch.dtype) -> int:
        return self.sections(num_weights, dtype)[-1][1]


RAW = Coding(0)


@dataclass(frozen=True)
class Integers:
    """A part's weights as integers. Shapes: n weights, g groups."""

    values: Tensor
    """uint8 0..15 or int8, `(n,)`."""
    scales: Tensor
    """`(g,)`, in the weights' dtype."""
    zeros: Tensor | None
    """`(g,)`, in the weights' dtype; none for int8."""


def encode(coding: Coding, integers: Integers, stored: Tensor) -> None:
    """Lays a part out in `stored`, uint8, which begins where the part does."""
    num_weights, dtype = integers.values.numel(), integers.scales.dtype
    sections = [stored[a:b] for a, b in coding.sections(num_weights, dtype)]
    if coding.packs:
        low, high = integers.values.view(2, -1)
        sections[0].copy_(low | high << 4)
        assert integers.zeros is not None
        sections[2].view(dtype).copy_(integers.zeros)
    else:
        sections[0].view(torch.int8).copy_(integers.values)
    sections[1].view(dtype).copy_(integers.scales)


def decode(coding: Coding, stored: Tensor, target: Tensor) -> None:
    """Fills `target` `(n,)` with the weights of a part that begins where `stored`, uint8, does."""
    num_weights, dtype = target.numel(), target.dtype
    sections = [stored[a:b] for a, b in coding.sections(num_weights, dtype)]
    if not coding.bits:
        target.copy_(sections[0].view(dtype))
        return
    groups = target.view(-1, coding.group_size)
    scales = sections[1].view(dtype)[:, None]
    if coding.packs:
        half = num_weights // 2
        target[:half] = sections[0] & 15
        target[half:] = sections[0] >> 4
        groups -= sections[2].view(dtype)[:, None]
    else:
        target.copy_(sections[0].view(torch.int8))
    groups *= scales
