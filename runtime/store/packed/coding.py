"""Weights in a slot: as they are, in blocks of a GGUF type, HQQ, or a checkpoint's own tensors.

Rows of a GGUF type are the bytes that a GGUF file has (`runtime.store.ggml`), and are multiplied as
they are. HQQ, of Klotski, is integers of four bits in groups of consecutive weights, with scales
and zeros that are bytes u; four float32 numbers of a meta group of these make their values:

    w = (q - zero) * scale    q 0..15    scale = u * a + b    zero = u * c + d

Of G groups, the low halves of the bytes hold the integers of the first ceil(G / 2), the high ones
those of the others. Arithmetic is in float32, operation by operation, rounded once at the end.
`quantise_half_quadratic` finds integers, scales and zeros.

Shape suffixes: N weights, G groups, S weights of a group, M meta groups.
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


SEARCHED_AT_ONCE = 1 << 17
"""Weights that are searched at once: what the processor's cache holds a few times as float32."""
SEARCH_STEPS = 20
NORM, BETA, GROWTH = 0.7, 10.0, 1.01
"""The norm of the error, the weight of the quadratic term and its growth with each step: the values
of HQQ's authors."""


def quantise_half_quadratic(coding: Coding, weights_N: Tensor) -> Integers:
    """Half-quadratic quantisation (Klotski, section 7, equations 8 and 9).

    Zeros are searched for scales that reach from a group's smallest to its largest weight. Then
    scales and zeros become eight-bit integers with a scale and an offset for each meta group, and
    weights are rounded with what these decode to.
    """
    weights_GS = weights_N.view(-1, coding.group_size)
    step = max(1, SEARCHED_AT_ONCE // coding.group_size)
    parts = [search_zeros(part_GS.float()) for part_GS in weights_GS.split(step)]
    scales, scales_M2 = _quantise_meta(torch.cat([scales for scales, _ in parts]), coding)
    zeros, zeros_M2 = _quantise_meta(torch.cat([zeros for _, zeros in parts]), coding)
    meta_M4 = torch.cat([scales_M2, zeros_M2], dim=1)
    integers = Integers(torch.empty(0, dtype=torch.uint8), scales, zeros, meta_M4)
    scales_G, zeros_G = integers.group_values(coding)
    values = [
        _round_weights(part_GS.float(), scales_G1, zeros_G1).to(torch.uint8)
        for part_GS, scales_G1, zeros_G1 in zip(
            weights_GS.split(step),
            scales_G[:, None].split(step),
            zeros_G[:, None].split(step),
            strict=True,
        )
    ]
    return Integers(torch.cat(values).view(-1), scales, zeros, meta_M4)


def _round_weights(weights_GS: Tensor, scales_G1: Tensor, zeros_G1: Tensor) -> Tensor:
    """Returns `round(W / s + z)` of Klotski's equation 8, as float32."""
    return (weights_GS / scales_G1).add_(zeros_G1).round_().clamp_(0, 15)


def search_zeros(weights_GS: Tensor) -> tuple[Tensor, Tensor]:
    """Returns scales and the zeros with the least error `[G]`, in float32.

    The error, of a norm below 1, is split in two (Klotski, equation 9; Half-Quadratic Quantization,
    Badri and Shaji): a proximal step assigns large errors to outliers, and the zero is the mean
    that fits the other weights.
    """
    low_G1, high_G1 = weights_GS.amin(1, keepdim=True), weights_GS.amax(1, keepdim=True)
    scales_G1 = (high_G1 - low_G1) / 15
    # Of equal weights, the scale is their size, so that they stay what they are.
    equal_G1 = torch.where(low_G1 == 0, torch.ones_like(low_G1), low_G1.abs())
    scales_G1 = torch.where(scales_G1 == 0, equal_G1, scales_G1)
    zeros_G1 = (-low_G1 / scales_G1).round_()
    best_G1, least_G1 = zeros_G1, torch.full_like(zeros_G1, float("inf"))
    beta = BETA
    for _ in range(SEARCH_STEPS):
        integers_GS = _round_weights(weights_GS, scales_G1, zeros_G1)
        errors_GS = weights_GS - (integers_GS - zeros_G1) * scales_G1
        error_G1 = errors_GS.abs().mean(1, keepdim=True)
        is_better_G1 = error_G1 < least_G1
        if not is_better_G1.any():
            break
        best_G1 = torch.where(is_better_G1, zeros_G1, best_G1)
        least_G1 = torch.where(is_better_G1, error_G1, least_G1)
        outliers_GS = _shrink(errors_GS, beta)
        zeros_G1 = (integers_GS - (weights_GS - outliers_GS) / scales_G1).mean(1, keepdim=True)
        beta *= GROWTH
    return scales_G1[:, 0], best_G1[:, 0]


def _shrink(errors_GS: Tensor, beta: float) -> Tensor | float:
    """Returns the proximal operator of the norm, generalised soft thresholding.

    It is 0 for errors below `beta ** (-1 / (2 - NORM))`, all of those of weights below 2 or so.
    """
    size_GS = errors_GS.abs()
    if size_GS.max() <= beta ** (-1 / (2 - NORM)):
        return 0.0
    return errors_GS.sign() * (size_GS - size_GS.pow(NORM - 1) / beta).relu_()


def _quantise_meta(values_G: Tensor, coding: Coding) -> tuple[Tensor, Tensor]:
    """Returns values as uint8 `[G]` with a scale and an offset of each meta group `[M, 2]`."""
    size = coding.meta_group_size
    num_groups = -(-len(values_G) // size)
    padded_MS = values_G.new_empty(num_groups * size)
    padded_MS[: len(values_G)] = values_G
    padded_MS[len(values_G) :] = values_G[-1]
    padded_MS = padded_MS.view(num_groups, size)
    low_M1, high_M1 = padded_MS.amin(1, keepdim=True), padded_MS.amax(1, keepdim=True)
    scales_M1 = (high_M1 - low_M1) / 255
    # All values of a meta group may be equal.
    steps_MS = (padded_MS - low_M1) / scales_M1.masked_fill(scales_M1 == 0, 1)
    integers_MS = steps_MS.round_().clamp_(0, 255).to(torch.uint8)
    return integers_MS.view(-1)[: len(values_G)], torch.cat([scales_M1, low_M1], dim=1)
