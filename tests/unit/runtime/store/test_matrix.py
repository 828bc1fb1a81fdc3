"""Matrices of integers: products without decoding, the same for a token in every batch."""

import pytest
import torch

from runtime.store.packed import kernel_choice
from runtime.store.packed.blocks import native_block
from runtime.store.packed.coding import Coding, decode, encode
from runtime.store.packed.kernel_choice import has_kernel, measure_ratio
from runtime.store.packed.matrix import QuantisedMatrix, view_rows
from runtime.store.packed.quantise import quantise

pytestmark = pytest.mark.skipif(native_block() is None, reason="NO KERNEL FOR THIS PROCESSOR")

INT4 = Coding(4, 32, block=native_block() or 0)
SHAPES = [(16, 32), (80, 64), (976, 256), (256, 960)]


def coding_of(bits: int, num_columns: int) -> Coding:
    return INT4 if bits == 4 else Coding(8, num_columns)


def stored_matrix(
    bits: int, shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16
) -> tuple[QuantisedMatrix, torch.Tensor]:
    """A random matrix, ready to be multiplied, and its decoded weights in float32."""
    generator = torch.Generator().manual_seed(shape[0])
    weight = torch.randn(shape, generator=generator).to(dtype)
    coding = coding_of(bits, shape[1])
    assert has_kernel(coding, shape[1])
    stored = torch.zeros(coding.num_bytes(weight.numel(), dtype), dtype=torch.uint8)
    encode(coding, quantise(coding, weight.view(-1)), stored, num_columns=shape[1])
    decoded = torch.empty(weight.numel(), dtype=dtype)
    decode(coding, stored, decoded, num_columns=shape[1])
    rows = view_rows(coding, stored, weight.numel(), shape[1], dtype)
    return QuantisedMatrix([rows]), decoded.view(shape).float()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bits", [4, 8])
def test_linear__is_the_product_with_the_decoded_weights(
    bits: int, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    matrix, decoded = stored_matrix(bits, shape, dtype)
    x_TK = torch.randn(5, shape[1], generator=torch.Generator().manual_seed(1)).to(dtype)
    found = matrix.linear(x_TK)
    assert found.dtype == dtype
    expected = x_TK.bfloat16().float() @ decoded.T
    # Outputs are rounded to bfloat16, weights of a bfloat16 model too before this product.
    assert (found.float() - expected).abs().max() <= 0.02 * expected.abs().max()


@pytest.mark.parametrize("num_columns", [8, 24, 40])
def test_kernel__is_not_used_for_rows_that_it_reads_beyond(num_columns: int) -> None:
    # The process would end with a segmentation fault.
    assert not has_kernel(Coding(8, num_columns), num_columns)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bits", [4, 8])
def test_linear__a_token_has_the_same_bits_in_every_batch(
    bits: int, shape: tuple[int, int]
) -> None:
    matrix, _ = stored_matrix(bits, shape)
    x_TK = torch.randn(67, shape[1], generator=torch.Generator().manual_seed(2)).bfloat16()
    alone = torch.cat([matrix.linear(x_TK[t : t + 1]) for t in range(67)])
    for size in (2, 3, 4, 5, 8, 16, 33, 67):
        together = torch.cat([matrix.linear(part) for part in x_TK.split(size)])
        assert torch.equal(together, alone), size


def test_linear__several_parts_are_rows_after_each_other() -> None:
    first, second = (stored_matrix(4, (shape, 64))[0] for shape in (48, 80))
    x_TK = torch.randn(3, 64).bfloat16()
    both = QuantisedMatrix([*first._parts, *second._parts])
    expected = torch.cat([first.linear(x_TK), second.linear(x_TK)], dim=-1)
    assert torch.equal(both.linear(x_TK), expected)


def test_has_kernel__needs_this_processors_blocks_or_one_scale_per_row() -> None:
    other = next(block for block in (32, 64) if block != native_block())
    assert not has_kernel(Coding(4, 32, block=other), 64)
    assert not has_kernel(Coding(4, 32), 64)
    assert not has_kernel(Coding(8, 32), 64)


@pytest.mark.parametrize("coding", [INT4, Coding(8, 64)])
def test_has_kernel__must_be_faster_than_decoding(
    monkeypatch: pytest.MonkeyPatch, coding: Coding
) -> None:
    assert measure_ratio(coding) > 0
    for ratio in (0.9, 1.1):
        monkeypatch.setattr(kernel_choice, "measure_ratio", lambda _, ratio=ratio: ratio)
        assert has_kernel(coding, 64) == (ratio > 1)
