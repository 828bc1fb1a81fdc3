"""Int4 matrices in blocks: the order of PyTorch's kernels, whole and partial blocks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runtime.store.packed.blocks import (
    BLOCKS,
    decode_blocks,
    fits,
    from_blocks,
    native_block,
    to_blocks,
)


def random_integers(num_rows: int, num_columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_rows * num_columns)
    return torch.randint(0, 16, (num_rows, num_columns), dtype=torch.uint8, generator=generator)


@given(sixteens=st.integers(1, 12), num_columns=st.integers(1, 9), block=st.sampled_from([32, 64]))
def test_from_blocks__returns_what_was_stored(sixteens: int, num_columns: int, block: int) -> None:
    values_NK = random_integers(16 * sixteens, num_columns)
    stored = to_blocks(values_NK, block)
    assert stored.shape == (8 * sixteens * num_columns,)
    assert torch.equal(from_blocks(stored, *values_NK.shape, block), values_NK)


@pytest.mark.skipif(native_block() is None, reason="NO KERNEL FOR THIS PROCESSOR")
@pytest.mark.parametrize("shape", [(16, 32), (64, 32), (80, 64), (112, 32), (256, 96)])
def test_to_blocks__is_the_order_of_the_kernel(shape: tuple[int, int]) -> None:
    block = native_block()
    assert block is not None
    values_NK = random_integers(*shape)
    expected = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values_NK.int(), 1)
    assert torch.equal(to_blocks(values_NK, block), expected.flatten())


@pytest.mark.parametrize("block", sorted(BLOCKS.values()))
def test_decode_blocks__follows_the_formula(block: int) -> None:
    values_NK = random_integers(48, 64)
    scales_GN2 = torch.rand(2, 48, 2).bfloat16()
    found = decode_blocks(to_blocks(values_NK, block), scales_GN2, (48, 64), block)
    for row, column in ((0, 0), (17, 31), (33, 32), (47, 63)):
        scale, offset = scales_GN2[column // 32, row].float()
        assert found[row, column] == (float(values_NK[row, column]) - 8) * scale + offset


def test_fits__takes_the_shapes_of_the_kernel() -> None:
    assert fits(16, 32, 32)
    assert not fits(8, 32, 32)
    assert not fits(16, 48, 32)
    assert not fits(16, 48, 48)
