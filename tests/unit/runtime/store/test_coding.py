"""What lies in a slot becomes weights by the written formula, bit for bit."""

import pytest
import torch

from runtime.store.ggml.library import decode_rows, encode_rows
from runtime.store.packed import coding
from runtime.store.packed.coding import HQQ, RAW, Coding, Integers, decode, encode


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("groups", "step"), [(1, 64), (2, 64), (7, 96), (9, 1 << 18), (64, 100)])
def test_decode__hqq_is_the_formula(dtype, groups, step, monkeypatch):
    monkeypatch.setattr(coding, "STEP", step)
    torch.manual_seed(groups)
    how, num_weights = Coding(HQQ, 32, 4), groups * 32
    sizes = (16, num_weights), (256, groups), (256, groups)
    parts = [torch.randint(0, top, (number,)).to(torch.uint8) for top, number in sizes]
    integers = Integers(*parts, torch.rand(how.meta_groups(groups), 4))
    stored = torch.full((how.num_bytes(num_weights, dtype),), 0xEE, dtype=torch.uint8)
    encode(how, integers, stored)
    found = torch.empty(num_weights, dtype=dtype)
    decode(how, stored, found)
    expected = []
    for i, value in enumerate(integers.values.tolist()):
        scale, zero = integers.scales[i // 32].float(), integers.zeros[i // 32].float()
        a, b, c, d = integers.meta[i // 32 // 4]
        expected.append((value - (zero * c + d)) * (scale * a + b))
    assert torch.equal(found, torch.stack(expected).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("step", [64, 100, 1 << 18])
def test_decode__rows_are_the_librarys(dtype, step, monkeypatch):
    monkeypatch.setattr(coding, "STEP", step)
    how, stored = Coding("Q4_0"), encode_rows("Q4_0", torch.randn(5, 96))
    assert how.num_bytes(5 * 96, dtype) == len(stored) == 15 * 18
    found = torch.empty(5 * 96, dtype=dtype)
    decode(how, stored, found)
    assert torch.equal(found, decode_rows("Q4_0", stored).to(dtype))


def test_coding__sizes():
    # An odd number of groups of HQQ: the last has its byte to itself. Two meta groups of 2 and 1
    # groups: a byte for each scale and zero, then 32 bytes, each from a multiple of 64 bytes on.
    assert Coding(HQQ, 64, 2).sections(192) == [(0, 128), (128, 131), (192, 195), (256, 288)]
    assert RAW.num_bytes(128, torch.bfloat16) == 256
    assert Coding("Q4_K").num_bytes(512, torch.bfloat16) == 288
    assert Coding("F16").num_bytes(128, torch.float32) == 256


# ---- half-quadratic quantisation: near the weights, and what its search wins


HOW = Coding(HQQ, 64, 128)


def restore(weights: torch.Tensor) -> torch.Tensor:
    """Quantises the weights, lays them out and decodes them."""
    stored = torch.empty(HOW.num_bytes(len(weights), weights.dtype), dtype=torch.uint8)
    encode(HOW, coding.quantise_half_quadratic(HOW, weights), stored)
    found = torch.empty_like(weights)
    decode(HOW, stored, found)
    return found


def error(found: torch.Tensor, weights: torch.Tensor) -> float:
    return ((found.float() - weights.float()).abs().mean() / weights.float().abs().mean()).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_quantise__is_near(dtype):
    torch.manual_seed(0)
    weights = (0.02 * torch.randn(64 * 96)).to(dtype)
    assert error(restore(weights), weights) < 0.12


@pytest.mark.parametrize("value", [0.0, 3.0, -2.0])
def test_quantise__equal_weights_stay_what_they_are(value):
    weights = torch.full((64 * 16,), value)
    assert torch.equal(restore(weights), weights)


def test_hqq__is_smaller_than_q4_0_and_about_as_near():
    torch.manual_seed(0)
    weights = (0.02 * torch.randn(64 * 1024)).bfloat16()
    # Two numbers of 8 bits for 64 weights, and a hundred and twenty-eighth of 4 of 32 bits.
    size = HOW.num_bytes(len(weights), weights.dtype)
    assert 8 * size / len(weights) == 4 + 16 / 64 + 1 / 64 < 4.5
    other = decode_rows("Q4_0", encode_rows("Q4_0", weights.view(-1, 64)))
    assert error(restore(weights), weights) < 1.1 * error(other, weights)


def test_hqq__gives_an_outlier_its_error():
    # One weight far above the others: with its error left out, the zero fits the many.
    torch.manual_seed(0)
    weights_GS = 3 * torch.randn(8, 64)
    weights_GS[:, 0] = 40
    scales, zeros = (values[:, None] for values in coding.search_zeros(weights_GS))

    def mean_error(zeros):
        integers = (weights_GS / scales + zeros).round().clamp(0, 15)
        return (weights_GS - (integers - zeros) * scales).abs().mean(1)

    first = (-weights_GS.amin(1, keepdim=True) / scales).round()
    assert (mean_error(zeros) <= mean_error(first)).all()
    assert mean_error(zeros).mean() < 0.97 * mean_error(first).mean()
