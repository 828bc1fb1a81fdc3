"""Quantised checkpoints in the layouts of the Hub, made of tiny unquantised ones."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.builders.families.build import save_family
from tests.builders.families.table import FAMILIES
from tests.builders.models import set_fields
from tests.builders.saved import saved_once

FP8_LARGEST = 448.0
"""The largest float8_e4m3fn."""
FP8_BLOCK = 16


def rewrite(folder: Path, change: Callable[[str, Tensor], dict], quantization: Any = None) -> Path:
    """Replaces each tensor by what `change` makes of it, in one file; returns the folder."""
    made: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            made.update(change(name, tensor))
        file.unlink()
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    made = {name: tensor.contiguous() for name, tensor in made.items()}
    save_file(made, folder / "model.safetensors", metadata={"format": "pt"})
    return folder if quantization is None else set_fields(folder, quantization_config=quantization)


def quantise_fp8(folder: Path, *, scale_dtype: torch.dtype = torch.float32) -> Path:
    """As deepseek_v3 and qwen3_moe are published: `X.weight` float8_e4m3fn `(out, in)` and
    `X.weight_scale_inv` `(out / block, in / block)` for every projection; later ones have scales
    that are powers of two, float8_e8m0fnu."""

    def change(name: str, tensor: Tensor) -> dict[str, Tensor]:
        if not name.endswith(("proj.weight", "w1.weight", "w2.weight", "w3.weight")):
            return {name: tensor}
        rows, columns = tensor.shape
        height, width = min(FP8_BLOCK, rows), min(FP8_BLOCK, columns)
        blocks = tensor.float().view(rows // height, height, columns // width, width)
        scale = blocks.abs().amax((1, 3), keepdim=True) / FP8_LARGEST
        scale = scale.to(scale_dtype).float()
        return {
            name: (blocks / scale).to(torch.float8_e4m3fn).view(rows, columns),
            f"{name}_scale_inv": scale.view(rows // height, columns // width).to(scale_dtype),
        }

    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    return rewrite(folder, change, config | {"weight_block_size": [FP8_BLOCK, FP8_BLOCK]})


def quantise_mxfp4(folder: Path) -> Path:
    """As gpt_oss is published: random `X_blocks` uint8 `(E, out, in / 32, 16)`, two numbers a byte,
    and `X_scales` uint8 `(E, out, in / 32)`, powers of two."""
    generator = torch.Generator().manual_seed(4)

    def change(name: str, tensor: Tensor) -> dict[str, Tensor]:
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            return {name: tensor}
        experts, inputs, outputs = tensor.shape
        shape = (experts, outputs, inputs // 32)
        draw = partial(torch.randint, dtype=torch.uint8, generator=generator)
        return {f"{name}_blocks": draw(256, (*shape, 16)), f"{name}_scales": draw(120, 126, shape)}

    plain = [f"model.layers.*.{part}" for part in ("self_attn", "mlp.router")]
    plain += ["model.embed_tokens", "lm_head"]
    return rewrite(folder, change, {"quant_method": "mxfp4", "modules_to_not_convert": plain})


@saved_once
def quantised(folder: Path, name: str) -> Path:
    """Saves a tiny model of a family in the format in which it is published."""
    if name == "gpt_oss":  # mxfp4 has blocks of 32
        wide = FAMILIES[name].changed(hidden_size=64, intermediate_size=32)
        return quantise_mxfp4(save_family(folder, wide, dtype=torch.bfloat16))
    save_family(folder, name, dtype=torch.bfloat16)
    scale_dtype = torch.float8_e8m0fnu if name == "minimax_m2" else torch.float32
    return quantise_fp8(folder, scale_dtype=scale_dtype)


QUANTISED = ["qwen3_moe", "deepseek_v3", "minimax_m2", "gpt_oss"]
