"""Half-quadratic quantisation: near the weights, and what its search wins."""

import pytest
import torch

from runtime.store.ggml.library import decode_rows, encode_rows
from runtime.store.packed import coding
from runtime.store.packed.coding import HQQ, Coding, quantise_half_quadratic, search_zeros

HOW = Coding(HQQ, 64, 128)


def restore(weights: torch.Tensor) -> torch.Tensor:
    """Quantises the weights, lays them out and decodes them."""
    stored = torch.empty(HOW.num_bytes(len(weights), weights.dtype), dtype=torch.uint8)
    coding.encode(HOW, quantise_half_quadratic(HOW, weights), stored)
    found = torch.empty_like(weights)
    coding.decode(HOW, stored, found)
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
    scales, zeros = (values[:, None] for values in search_zeros(weights_GS))

    def mean_error(zeros):
        integers = (weights_GS / scales + zeros).round().clamp(0, 15)
        return (weights_GS - (integers - zeros) * scales).abs().mean(1)

    first = (-weights_GS.amin(1, keepdim=True) / scales).round()
    assert (mean_error(zeros) <= mean_error(first)).all()
    assert mean_error(zeros).mean() < 0.97 * mean_error(first).mean()
