"""Integers with scales become weights by the written formula, bit for bit."""

import pytest
import torch

from runtime.store.packed import coding
from runtime.store.packed.coding import RAW, Coding, Integers, decode, encode


def random_integers(how: Coding, num_weights: int, dtype: torch.dtype) -> Integers:
    groups = num_weights // how.group_size
    low, high = (0, 16) if how.packs else (-127, 128)
    values = torch.randint(low, high, (num_weights,))
    if how.meta_group_size:
        return Integers(
            values.to(torch.uint8),
            torch.randint(0, 256, (groups,)).to(torch.uint8),
            torch.randint(0, 256, (groups,)).to(torch.uint8),
            torch.rand(how.meta_groups(groups), 4),
        )
    return Integers(
        values.to(torch.uint8 if how.packs else torch.int8),
        torch.rand(groups).mul(0.02).to(dtype),
        torch.rand(groups).mul(15).to(dtype) if how.packs else None,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("how", [Coding(8, 32), Coding(4, 32), Coding(4, 32, 4)])
@pytest.mark.parametrize(("groups", "step"), [(1, 64), (2, 64), (7, 96), (9, 1 << 18), (64, 100)])
def test_decode__is_the_formula(dtype, how, groups, step, monkeypatch):
    monkeypatch.setattr(coding, "STEP", step)
    torch.manual_seed(groups)
    num_weights = groups * 32
    integers = random_integers(how, num_weights, dtype)
    stored = torch.full((how.num_bytes(num_weights, dtype),), 0xEE, dtype=torch.uint8)
    encode(how, integers, stored)
    found = torch.empty(num_weights, dtype=dtype)
    decode(how, stored, found)
    expected = []
    for i, value in enumerate(integers.values.tolist()):
        scale = integers.scales[i // 32].float()
        zero = torch.tensor(0.0) if integers.zeros is None else integers.zeros[i // 32].float()
        if integers.meta is not None:
            a, b, c, d = integers.meta[i // 32 // 4]
            scale, zero = scale * a + b, zero * c + d
        expected.append((value - zero) * scale)
    assert torch.equal(found, torch.stack(expected).to(dtype))


def test_coding__int4_takes_half_a_byte_and_the_groups_values():
    # 128 weights of 2 bytes: 2 groups of 64: 64 bytes, then scales and zeros, each from byte 64 on.
    assert Coding(4, 64).sections(128, torch.bfloat16) == [(0, 64), (64, 68), (128, 132)]
    # An odd number of groups: the last has its byte to itself.
    assert Coding(4, 64).sections(192, torch.float32) == [(0, 128), (128, 140), (192, 204)]
    assert Coding(8, 64).sections(128, torch.bfloat16) == [(0, 128), (128, 132)]
    # Two meta groups of 2 and 1 groups: a byte for each scale and zero, then 32 bytes.
    meta = Coding(4, 64, 2)
    assert meta.sections(192, torch.float32) == [(0, 128), (128, 131), (192, 195), (256, 288)]
    assert RAW.sections(128, torch.bfloat16) == [(0, 256)]
