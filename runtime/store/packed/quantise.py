"""Half-quadratic quantisation: finds integers, scales and zeros for weights.

Shape suffixes: N weights, G groups, S weights of a group, M meta groups.
"""

import torch
from torch import Tensor

from runtime.store.packed.coding import Coding, Integers

STEP = 1 << 17
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
    step = max(1, STEP // coding.group_size)
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
