"""Weights in a slot: as they are, in blocks of a GGUF type, HQQ, or a checkpoint's own tensors.

Rows of a GGUF type are the bytes that a GGUF file has (`runtime.store.ggml`), and are multiplied as
they are. HQQ, of Klotski, is integers of four bits in groups of consecutive weights, with scales
and zeros that are bytes u; four float32 numbers of a meta group of these make their values:

    w = (q - zero) * scale    q 0..15    scale = u * a + b    zero = u * c + d

Of G groups, the low halves of the bytes hold the integers of the first ceil(G / 2), the high ones
those of the others. Arithmetic is in float32, operation by operation, rounded once at the end.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.store.files import align
from runtime.store.ggml.library import TYPES, decode_rows

HQQ, STORED = "hqq", "stored"
META_BYTES = 16
"""Four float32 numbers of each meta group."""
STEP = 1 << 18
"""Weights that are decoded at once: a megabyte as float32. Fewer cost calls, more the cache."""
DECODING_BYTES, UNEVEN_DECODING_BYTES = 12, 20
"""Memory for each weight that is decoded at once, of types with even and with uneven (IQ) steps:
PyTorch makes several copies."""


@dataclass(frozen=True)
class Coding:
    kind: str = ""
    """A GGUF type, such as `Q4_K`; `hqq`; `stored`; empty: weights as they are."""
    group_size: int = 0
    """Weights of HQQ that share a scale and a zero."""
    meta_group_size: int = 0
    """Groups of HQQ whose scales and zeros have a common scale and offset."""
    shape: tuple[int, ...] = ()
    """Shape of a stored tensor, one of several that Transformers makes weights of."""
    dtype: torch.dtype | None = None

    @property
    def block(self) -> int:
        """The weights that a part consists of a multiple of."""
        if self.kind in TYPES:
            return TYPES[self.kind].block
        return self.group_size or 1

    def halves(self, num_weights: int) -> int:
        """Weights in the low halves of HQQ's bytes: those of half the groups, rounded up."""
        return -(-num_weights // (2 * self.group_size)) * self.group_size

    def meta_groups(self, num_groups: int) -> int:
        return -(-num_groups // self.meta_group_size)

    def sections(self, num_weights: int) -> list[tuple[int, int]]:
        """`(start, end)` in bytes of HQQ's integers, scales, zeros and meta groups."""
        groups = num_weights // self.group_size
        sizes = [self.halves(num_weights), groups, groups, self.meta_groups(groups) * META_BYTES]
        found, start = [], 0
        for size in sizes:
            found.append((start, start + size))
            start = align(start + size)
        return found

    def num_bytes(self, num_weights: int, dtype: torch.dtype) -> int:
        if self.kind == HQQ:
            return self.sections(num_weights)[-1][1]
        if self.kind in TYPES:
            return TYPES[self.kind].row_bytes(num_weights)
        return num_weights * (self.dtype or dtype).itemsize

    def scratch_bytes(self, num_weights: int, dtype: torch.dtype) -> int:
        """Memory that `decode` needs in addition to its result."""
        if self.kind in ("", STORED):
            return 0
        if self.kind != HQQ:
            each = UNEVEN_DECODING_BYTES if self.kind.startswith("IQ") else DECODING_BYTES
            return each * min(STEP, num_weights)
        # Each scale and zero is made of two numbers.
        groups = num_weights // self.group_size * 24
        step = min(max(1, STEP // self.group_size) * self.group_size, num_weights)
        return groups + step // 2 + (dtype != torch.float32) * step * 4

    def name(self, dtype: torch.dtype) -> str:
        """Return the name of the coding, or of the dtype of what is stored without one."""
        return self.kind if self.kind in (HQQ, *TYPES) else str(self.dtype or dtype).split(".")[1]


RAW = Coding()


@dataclass(frozen=True)
class Integers:
    """A part's weights as HQQ's integers. Shapes: n weights, g groups."""

    values: Tensor
    """uint8 0..15, `(n,)`."""
    scales: Tensor
    """uint8, `(g,)`."""
    zeros: Tensor
    meta: Tensor
    """`(m, 4)` float32: scale and offset of the scales, scale and offset of the zeros."""

    def group_values(self, coding: Coding) -> list[Tensor]:
        """Returns scales and zeros as float32, `(g,)` each."""
        values = [self.scales.float(), self.zeros.float()]
        numbers = self.meta.repeat_interleave(coding.meta_group_size, 0)[: len(self.scales)].T
        for value, scale, offset in zip(values, numbers[::2], numbers[1::2], strict=True):
            value.mul_(scale).add_(offset)
        return values


def encode(coding: Coding, integers: Integers, stored: Tensor) -> None:
    """Lays a part out in `stored`, uint8, which begins where the part does."""
    num_weights = integers.values.numel()
    sections = [stored[a:b] for a, b in coding.sections(num_weights)]
    half = sections[0].numel()
    sections[0].copy_(integers.values[:half])
    sections[0][: num_weights - half] |= integers.values[half:] << 4
    sections[1].copy_(integers.scales)
    sections[2].copy_(integers.zeros)
    sections[3].view(torch.float32).copy_(integers.meta.view(-1))


def decode(coding: Coding, stored: Tensor, target: Tensor) -> None:
    """Fills `target` `(n,)` with the weights of a part that begins where `stored`, uint8, does."""
    num_weights, dtype = target.numel(), target.dtype
    if coding.kind == HQQ:
        _decode_hqq(coding, stored, target)
        return
    stored = stored[: coding.num_bytes(num_weights, dtype)]
    if not coding.kind:
        target.copy_(stored.view(dtype))
        return
    step = max(1, STEP // coding.block) * coding.block
    for part, raw in zip(
        target.split(step), stored.split(coding.num_bytes(step, dtype)), strict=True
    ):
        part.copy_(decode_rows(coding.kind, raw))


def _decode_hqq(coding: Coding, stored: Tensor, target: Tensor) -> None:
    num_weights, dtype, size = target.numel(), target.dtype, coding.group_size
    integers, scales, zeros, meta = (stored[a:b] for a, b in coding.sections(num_weights))
    meta_M4 = meta.view(torch.float32).view(-1, 4)
    values = Integers(integers, scales, zeros, meta_M4).group_values(coding)
    scales_G1, zeros_G1 = (value[:, None] for value in values)
    integers = integers.view(-1, size)
    num_groups = num_weights // size
    groups = target.view(num_groups, size)
    half, step = len(integers), max(1, STEP // size)
    # In float32 the target is its own scratch; to other dtypes the result is rounded at the end.
    scratch = None
    if dtype != torch.float32:
        scratch = torch.empty((min(step, num_groups), size), device=target.device)
    for start in range(0, num_groups, step):
        end = min(start + step, num_groups)
        made = groups[start:end] if scratch is None else scratch[: end - start]
        middle = min(max(start, half), end)
        high = integers[max(middle, half) - half : max(end, half) - half]
        torch.bitwise_and(integers[start:middle], 15, out=made[: middle - start])
        torch.bitwise_right_shift(high, 4, out=made[middle - start :])
        made -= zeros_G1[start:end]
        made *= scales_G1[start:end]
        if scratch is not None:
            groups[start:end] = made
