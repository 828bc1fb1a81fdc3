"""Decodes blocks of GGUF's types of tensors.

Types of four bits are a scale and an offset for each 32 weights, which is what a kernel multiplies
(`runtime.store.packed.blocks`): their integers stay what they are, scale and offset are rounded to
bfloat16. The others are decoded with Transformers' and gguf's own functions.

Shape suffixes: B blocks, G groups of 32 weights, S weights of a group.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from transformers.integrations.gguf.dequant import GGML_BLOCK, dequantize

from runtime.store.packed.blocks import MIDDLE
from runtime.store.packed.coding import Integers

GROUP_SIZE = 32
GROUPS_OF_K = 8
"""Groups of a block of Q4_K."""
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

Groups = tuple[Tensor, Tensor, Tensor]
"""Integers 0..15 `(G, S)` uint8, the scales `(G,)`, and the weights `(G,)` that 0 stands for,
float32."""


def _half(raw_BN: Tensor, start: int) -> Tensor:
    """Return the float16 number of each block that begins at a byte, as float32."""
    return raw_BN[:, start : start + 2].contiguous().view(torch.float16).float().view(-1)


def _q4_0(raw_BN: Tensor) -> Groups:
    scales, quarters = _half(raw_BN, 0), raw_BN[:, 2:]
    return torch.cat([quarters & 15, quarters >> 4], 1), scales, -MIDDLE * scales


def _q4_1(raw_BN: Tensor) -> Groups:
    quarters = raw_BN[:, 4:]
    return torch.cat([quarters & 15, quarters >> 4], 1), _half(raw_BN, 0), _half(raw_BN, 2)


def _q4_k(raw_BN: Tensor) -> Groups:
    # Six bits each of eight scales and eight minima; the first four lie in six bits of a byte, the
    # others in four, with their two high bits above the first four's.
    first, second, last = raw_BN[:, 4:8], raw_BN[:, 8:12], raw_BN[:, 12:16]
    scales = torch.cat([first & 63, (last & 15) | (first >> 6) << 4], 1)
    minima = torch.cat([second & 63, (last >> 4) | (second >> 6) << 4], 1)
    quarters = raw_BN[:, 16:].reshape(-1, GROUPS_OF_K // 2, GROUP_SIZE)
    values = torch.stack([quarters & 15, quarters >> 4], 2).view(-1, GROUP_SIZE)
    scales_G = (_half(raw_BN, 0)[:, None] * scales).view(-1)
    return values, scales_G, -(_half(raw_BN, 2)[:, None] * minima).view(-1)


FOUR_BITS: dict[str, Callable[[Tensor], Groups]] = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q4_K": _q4_k}
"""Types whose integers a kernel multiplies."""


def block_size(kind: str) -> tuple[int, int]:
    """Return the weights and the bytes of a block."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    num_weights, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    return num_weights, num_bytes


def read_integers(kind: str, raw: Tensor) -> Integers:
    """Return blocks of a type of four bits, uint8, as integers in groups of 32 with offsets."""
    values_GS, scales_G, lowest_G = FOUR_BITS[kind](raw.view(-1, block_size(kind)[1]))
    offsets_G = lowest_G.add_(scales_G, alpha=MIDDLE)
    return Integers(values_GS.reshape(-1), scales_G.bfloat16(), offsets_G.bfloat16())


def decode_blocks(kind: str, raw: Tensor) -> Tensor:
    """Return the weights of whole blocks or numbers, uint8 `(n,)`, in order.

    Those of blocks are float32.
    """
    from gguf import GGMLQuantizationType, quants

    if kind in DTYPES:
        return raw.view(DTYPES[kind])
    number = GGMLQuantizationType[kind]
    if number in GGML_BLOCK:
        return dequantize(raw, number.value)
    return torch.from_numpy(quants.dequantize(raw.numpy(), number)).view(-1)


def count_bytes(kind: str, shape: tuple[int, ...]) -> int:
    num_weights, num_bytes = block_size(kind)
    return math.prod(shape) // num_weights * num_bytes
