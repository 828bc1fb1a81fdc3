"""Encodes weights as they are, or as integers with a scale (and a zero) for each group.

A group is `group_size` consecutive weights, row by row. The formulas are all there is to reading:

    int8   w = q * scale             q int8
    int4   w = (q - zero) * scale    q 0..15, two to a byte

Scales and zeros are in the weights' own dtype. Of G groups, the low halves of the int4 bytes hold
the first ceil(G / 2), the high halves the others. Arithmetic is in float32, operation by operation,
and rounded once to the weights' dtype.
"""

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.errors import StoreError
from runtime.store.layout import align

STEP = 1 << 18
"""Weights that are decoded at once: a megabyte as float32. Fewer cost calls, more the cache; on one
core 4 GB/s of bf16 weights from int8 and 3 from int4, where all at once gave 1.7 and 1."""


@dataclass(frozen=True)
class Coding:
    bits: int
    """8 or 4; 0: weights as they are."""
    group_size: int = 0

    @property
    def packs(self) -> bool:
        return self.bits == 4

    def halves(self, num_weights: int) -> int:
        """Weights in the low halves of int4 bytes: those of half the groups, rounded up."""
        return -(-num_weights // (2 * self.group_size)) * self.group_size

    def sections(self, num_weights: int, dtype: torch.dtype) -> list[tuple[int, int]]:
        """`(start, end)` in bytes of the weights alone; or of integers, scales and zeros."""
        if not self.bits:
            return [(0, num_weights * dtype.itemsize)]
        groups = num_weights // self.group_size * dtype.itemsize
        size = self.halves(num_weights) if self.packs else num_weights
        sizes = [size, groups] + [groups] * self.packs
        found, start = [], 0
        for size in sizes:
            found.append((start, start + size))
            start = align(start + size)
        return found

    def scratch_bytes(self, num_weights: int, dtype: torch.dtype) -> int:
        """Memory that `decode` needs in addition to its result, as float32."""
        if not self.bits:
            return 0
        groups = num_weights // self.group_size * 4 * (2 if self.packs else 1)
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
    """`(g,)`, in the weights' dtype."""
    zeros: Tensor | None
    """`(g,)`, in the weights' dtype; none for int8."""


def encode(coding: Coding, integers: Integers, stored: Tensor) -> None:
    """Lays a part out in `stored`, uint8, which begins where the part does."""
    num_weights, dtype = integers.values.numel(), integers.scales.dtype
    sections = [stored[a:b] for a, b in coding.sections(num_weights, dtype)]
    if coding.packs:
        half = sections[0].numel()
        sections[0].copy_(integers.values[:half])
        sections[0][: num_weights - half] |= integers.values[half:] << 4
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
    num_groups, size = num_weights // coding.group_size, coding.group_size
    integers = sections[0].view(-1, size)
    scales, *zeros = (one.view(dtype).view(num_groups, 1).float() for one in sections[1:])
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


def import_torchao():
    """Import torchao's primitives, only to quantise, because it takes four seconds.

    Raises:
        StoreError: it is not installed.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from torchao.quantization import quant_primitives
    except ImportError as error:
        raise StoreError(
            "quantising needs torchao: pip install 'moecast[quantise]', or pack with quantise=none"
        ) from error
    return quant_primitives


def quantise(coding: Coding, weights_N: Tensor) -> Integers:
    """A part's weights, `(N,)` in their own dtype, as integers; groups follow one another.

    int8: symmetric, the largest of a group is 127. int4: from the smallest to the largest of a
    group, zero among the values, so that zeros stay zeros. HQQ's search for better scales, also in
    torchao, takes twenty times as long and won nothing that the reference model shows: 1.6 and 1.8
    thousandths of a nat lost.
    """
    ao = import_torchao()
    dtype, block = weights_N.dtype, (1, coding.group_size)
    if coding.bits == 8:
        mapping, kind, bounds = ao.MappingType.SYMMETRIC, torch.int8, (-127, 127)
    else:
        mapping, kind, bounds = ao.MappingType.ASYMMETRIC, torch.uint8, (0, 15)
    groups = weights_N.view(-1, coding.group_size)
    scales, zeros = ao.choose_qparams_affine(
        groups, mapping, block, kind, *bounds, scale_dtype=dtype
    )
    values = ao.quantize_affine(groups, block, scales, zeros, kind, *bounds)
    kept = zeros.view(-1).to(dtype) if coding.bits == 4 else None
    return Integers(values.view(-1), scales.view(-1), kept)
