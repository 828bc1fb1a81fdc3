"""Integers near the weights, zeros that stay zeros, and what the search of HQQ wins."""

import pytest
import torch

from runtime.store.packed.coding import Coding, decode, encode
from runtime.store.packed.quantise import quantise, search_zeros

INT8, INT4, HQQ = Coding(8, 64), Coding(4, 64), Coding(4, 64, 128)
BLOCKS = Coding(4, 64, block=64)
NUM_COLUMNS = 64


def restore(how: Coding, weights: torch.Tensor) -> torch.Tensor:
    """Quantises the weights, lays them out and decodes them."""
    stored = torch.empty(how.num_bytes(len(weights), weights.dtype), dtype=torch.uint8)
    encode(how, quantise(how, weights), stored, num_columns=NUM_COLUMNS)
    found = torch.empty_like(weights)
    decode(how, stored, found, num_columns=NUM_COLUMNS)
    return found


def error(how: Coding, weights: torch.Tensor) -> float:
    found = restore(how, weights).float()
    return ((found - weights.float()).abs().mean() / weights.float().abs().mean()).item()


@pytest.mark.parametrize(
    ("how", "tolerance"), [(INT8, 0.01), (INT4, 0.12), (BLOCKS, 0.11), (HQQ, 0.12)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_quantise__is_near(how, tolerance, dtype):
    torch.manual_seed(0)
    weights = (0.02 * torch.randn(64 * 96)).to(dtype)
    assert error(how, weights) < tolerance


@pytest.mark.parametrize("how", [INT8, INT4, BLOCKS, HQQ])
@pytest.mark.parametrize("value", [0.0, 3.0, -2.0])
def test_quantise__equal_weights_stay_what_they_are(how, value):
    weights = torch.full((64 * 16,), value)
    assert torch.equal(restore(how, weights), weights)


@pytest.mark.parametrize("how", [INT8, INT4])
def test_quantise__zeros_stay_zeros(how):
    torch.manual_seed(0)
    weights = torch.randn(64 * 8).relu()
    assert not restore(how, weights)[weights == 0].any()


def test_hqq__is_smaller_and_nearer_than_int4():
    torch.manual_seed(0)
    weights = (0.02 * torch.randn(64 * 1024)).bfloat16()
    sizes = [how.num_bytes(len(weights), weights.dtype) for how in (INT4, HQQ)]
    # 4 bits; two numbers of 16 bits, or of 8 and a hundred and twenty-eighth of 4 of 32.
    assert [8 * size / len(weights) for size in sizes] == [4 + 32 / 64, 4 + 16 / 64 + 1 / 64]
    assert error(HQQ, weights) < 0.97 * error(INT4, weights)


def test_hqq__gives_an_outlier_its_error():
    # One weight far above the others: with its error left out, the zero fits the many.
    torch.manual_seed(0)
    weights_GS = 3 * torch.randn(8, 64)
    weights_GS[:, 0] = 40
    scales, zeros = (values[:, None] for values in search_zeros(weights_GS))

    def mean_error(zeros):
        integers = (weights_GS / scales + zeros).round().clamp(0, 15)
        return (weights_GS - (integers - zeros) * scales).abs().mean(1)

    first = (-weights_GS.amin(1, keepdim=True) / scales).round()
    assert (mean_error(zeros) <= mean_error(first)).all()
    assert mean_error(zeros).mean() < 0.97 * mean_error(first).mean()
