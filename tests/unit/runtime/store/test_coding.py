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
