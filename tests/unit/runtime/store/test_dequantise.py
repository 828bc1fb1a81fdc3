"""MXFP4 and FP8 matrices have the bits that Transformers' operations give them."""

import json

import pytest
import torch
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from runtime.hf.loading import load_plain, load_stripped
from runtime.store.conversion import ExpertConversion, dequantise_fp8, dequantise_mxfp4
from tests.builders.families.build import save_family
from tests.builders.models import read_weights, set_fields
from tests.builders.quantised import QUANTISED, quantise_fp8, quantised, rewrite
from tests.builders.served import serving

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def assert_bits(found, expected) -> None:
    """Equal to the sign of zeros; any NaN is as good as another."""
    assert found.is_contiguous()
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    numbers = ~expected.isnan()
    assert torch.equal(found.signbit()[numbers], expected.signbit()[numbers])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scales", [(0, 256), (110, 140)])
def test_mxfp4__is_the_librarys(dtype, scales):
    """With every scale there is, infinite and not normal ones included, and every byte."""
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(256, (1, 48, 6, 16), dtype=torch.uint8, generator=generator)
    exponents = torch.randint(*scales, (1, 48, 6), dtype=torch.uint8, generator=generator)
    expected = convert_moe_packed_tensors(blocks, exponents, dtype=dtype)[0]
    assert_bits(dequantise_mxfp4(blocks[0], exponents[0], dtype), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
@pytest.mark.parametrize("block", [(128, 128), (16, 32), (1, 32), (256, 64)])
def test_fp8__is_the_librarys(dtype, weight_dtype, scale_dtype, block):
    """With every byte, infinities and NaNs included, in blocks of any shape."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(256, (512, 256), dtype=torch.uint8, generator=generator)
    weight = weight.view(weight_dtype)
    scale = torch.rand(512 // block[0], 256 // block[1], generator=generator).to(scale_dtype)
    expected = Fp8Dequantize(None)._dequantize_one(weight, scale, dtype)
    found = torch.empty(512, 256, dtype=dtype)
    dequantise_fp8(weight, scale, found)
    assert_bits(found, expected)


def list_conversions(folder) -> list[ExpertConversion]:
    stripped = load_stripped(folder, "auto")
    plans = [plan for bank in stripped.plans for plan in bank.values()]
    return [ExpertConversion(stripped.model, plan) for plan in plans]


@pytest.mark.parametrize("name", QUANTISED)
def test_conversion__of_every_format_takes_the_fast_way(tmp_path, name):
    fused = [one for one in list_conversions(quantised(tmp_path, name)) if one.plan.is_compressed]
    assert {one._dequantise is None for one in fused} == {False}


def test_conversion__other_tensors_are_left_to_the_library(tmp_path):
    """Scales that are integers are another format of the same operation."""
    folder = save_family(tmp_path, "qwen3_moe", dtype=torch.bfloat16)
    conversions = list_conversions(quantise_fp8(folder, scale_dtype=torch.int32))
    assert {one._dequantise for one in conversions} == {None}


@pytest.mark.parametrize("part", ["mlp.experts.3.up_proj", "self_attn.q_proj"])
def test_load__a_smaller_last_block_has_its_own_scale(tmp_path, part):
    """As DeepSeek-V3's projection of 576 rows; the library takes blocks of equal size."""
    folder = quantise_fp8(save_family(tmp_path, "qwen3_moe", dtype=torch.bfloat16))
    sizes = [12, 16]  # of 16 rows: 12 with the first scale and 4 with the second
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    set_fields(folder, quantization_config=config | {"weight_block_size": sizes})
    name = f"model.layers.0.{part}.weight"
    weight = read_weights(folder)[name]
    num_rows, num_columns = weight.shape
    scales = torch.rand(-(-num_rows // sizes[0]), num_columns // sizes[1]) + 0.5
    end = f"{part.rpartition('.')[2]}.weight_scale_inv"  # that of every expert and layer
    rewrite(folder, lambda key, tensor: {key: scales.clone() if key.endswith(end) else tensor})
    scale_RC = scales.repeat_interleave(sizes[0], 0)[:num_rows].repeat_interleave(sizes[1], 1)
    expected = (weight.float() * scale_RC).bfloat16()

    plain = load_plain(folder, dtype="auto")
    block = plain.model.layers[0].get_submodule(name.split(".")[3])
    found = block.experts.gate_up_proj[3][num_rows:] if "experts" in part else block.q_proj.weight
    assert torch.equal(found, expected)
    tokens = torch.tensor([[5, 6, 7]])
    with serving(folder, budget="40%") as model, torch.no_grad():
        assert torch.equal(model(tokens).logits, plain(tokens).logits)
