"""Checkpoints of packed integers, made of tiny ones in bfloat16."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.builders.families.build import save_family
from tests.builders.families.table import FAMILIES
from tests.builders.quantised import rewrite
from tests.builders.saved import saved_once

AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column that each four bits of an integer hold, lowest first (AWQ's GEMM kernels)."""


def save_wide(folder: Path) -> Path:
    """Experts whose rows and columns the kernels take."""
    family = FAMILIES["qwen3_moe"].changed(hidden_size=64, moe_intermediate_size=64)
    return save_family(folder, family, dtype=torch.bfloat16)


def round_weight(
    weight: Tensor, *, bits: int = 4, group: int = 32, symmetric: bool, scale_dtype=torch.float16
) -> tuple[Tensor, Tensor, Tensor]:
    """`(q, scales, zeros)`, `(N, K)` from 0 and `(N, G)`, by the smallest and largest weight."""
    groups = weight.float().unflatten(1, (-1, group))
    top = 2**bits - 1
    if symmetric:
        scales = groups.abs().amax(-1) / (top // 2)
        zeros = torch.full_like(scales, 2 ** (bits - 1))
    else:
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scales = (high - low) / top
        zeros = (-low / scales).round().clamp(1, top)
    scales = scales.to(scale_dtype)
    q = (groups / scales[..., None].float()).round() + zeros[..., None]
    return q.clamp(0, top).flatten(1).to(torch.int64), scales, zeros.to(torch.int64)


def pack_along_rows(numbers: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Numbers `(rows, columns)` as int32 `(rows, columns * bits / 32)`, one by one."""
    per_word = 32 // bits
    words = numbers.unflatten(1, (-1, per_word))
    packed = torch.zeros(words.shape[:2], dtype=torch.int64)
    for place in range(per_word):
        packed |= words[..., order[place] if order else place] << (bits * place)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def is_linear(name: str, tensor: Tensor) -> bool:
    """Attention and experts; routers, embeddings and the head stay as they are."""
    return tensor.dim() == 2 and name.endswith("_proj.weight")


def quantise_integers(folder: Path, pack: Callable, quantization: dict[str, Any]) -> Path:
    """Replaces `X.weight` of every linear layer by what `pack` makes of it, as `X.NAME`."""

    def change(name: str, tensor: Tensor) -> dict[str, Tensor]:
        if not is_linear(name, tensor):
            return {name: tensor}
        module = name.removesuffix(".weight")
        return {f"{module}.{part}": value for part, value in pack(tensor).items()}

    return rewrite(folder, change, quantization)


def quantise_gptq(
    folder: Path, *, bits: int = 4, group: int = 32, symmetric=True, version="gptq", **changes: Any
) -> Path:
    """`qweight` `(K * bits / 32, N)`, `qzeros`, `scales` `(G, N)` float16, `g_idx` `(K,)`."""

    def pack(weight: Tensor) -> dict[str, Tensor]:
        q, scales, zeros = round_weight(weight, bits=bits, group=group, symmetric=symmetric)
        packed_zeros = pack_along_rows(zeros.t() - int(version == "gptq"), bits)
        groups = (torch.arange(weight.shape[1]) // group).to(torch.int32)
        tensors = {"qweight": pack_along_rows(q, bits).t(), "qzeros": packed_zeros}
        return tensors | {"scales": scales.t(), "g_idx": groups}

    config = {
        "quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric,
        "desc_act": False, "checkpoint_format": version,
    }  # fmt: skip
    return quantise_integers(folder, pack, config | changes)


def quantise_awq(folder: Path) -> Path:
    """`qweight` `(K, N / 8)` and `qzeros` `(G, N / 8)`, interleaved; `scales` `(G, N)` float16."""

    def pack(weight: Tensor) -> dict[str, Tensor]:
        q, scales, zeros = round_weight(weight, symmetric=False)
        weights, zeros = (pack_along_rows(one.t(), 4, AWQ_COLUMNS) for one in (q, zeros))
        return {"qweight": weights, "qzeros": zeros, "scales": scales.t()}

    config = {"bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    return quantise_integers(folder, pack, {"quant_method": "awq", **config})


def quantise_compressed_tensors(
    folder: Path, *, bits: int = 4, group: int | None = 32, symmetric: bool = True
) -> Path:
    """As the library itself packs: `pack-quantized`, with a scale for each group or row."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    sizes = {"num_bits": bits, "symmetric": symmetric, "group_size": group}
    weights = QuantizationArgs(strategy="group" if group else "channel", **sizes)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, format="pack-quantized")
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")

    def pack(weight: Tensor) -> dict[str, Tensor]:
        options = {"bits": bits, "symmetric": symmetric, "scale_dtype": weight.dtype}
        _, scales, zeros = round_weight(weight, group=group or weight.shape[1], **options)
        zero_point = (zeros - 2 ** (bits - 1)).to(torch.int8)
        tensors = {"weight": weight, "weight_scale": scales, "weight_zero_point": zero_point}
        return compressor.compress(tensors, scheme)

    config = {
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "quantization_status": "compressed", "ignore": ["lm_head"],
        "config_groups": {"group_0": scheme.model_dump(mode="json")},
    }  # fmt: skip
    return quantise_integers(folder, pack, config)


FORMATS: dict[str, tuple[Callable[..., Path], dict[str, Any], str | None]] = {
    "compressed-tensors": (quantise_compressed_tensors, {}, "Q4_0"),
    "compressed-tensors asymmetric": (quantise_compressed_tensors, {"symmetric": False}, "Q4_1"),
    "compressed-tensors channel": (quantise_compressed_tensors, {"group": None}, "Q4_0"),
    "compressed-tensors int8": (quantise_compressed_tensors, {"bits": 8, "group": None}, "Q8_0"),
    "compressed-tensors int8 groups": (quantise_compressed_tensors, {"bits": 8}, "Q8_0"),
    "compressed-tensors group of 16": (quantise_compressed_tensors, {"group": 16}, None),
    "gptq": (quantise_gptq, {}, "Q4_0"),
    "gptq asymmetric": (quantise_gptq, {"symmetric": False}, "Q4_1"),
    "gptq v2": (quantise_gptq, {"symmetric": False, "version": "gptq_v2"}, "Q4_1"),
    "gptq int8": (quantise_gptq, {"bits": 8, "group": 64}, "Q8_0"),
    "awq": (quantise_awq, {}, "Q4_1"),
}
"""By name what makes a checkpoint of a tiny one, and the type that slots hold its integers in."""


@saved_once
def save_integers(folder: Path, name: str) -> Path:
    quantise, options, _ = FORMATS[name]
    return quantise(save_wide(folder), **options)
