"""Blocks of every type against the `gguf` package's own decoding."""

from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from hypothesis import given
from hypothesis import strategies as st

from runtime.store.gguf.blocks import FOUR_BITS, block_size, decode_blocks, read_integers
from runtime.store.gguf.header import KINDS
from runtime.store.gguf.rows import choose_coding, repack
from runtime.store.packed.blocks import MIDDLE
from runtime.store.packed.coding import RAW, Integers

HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
"""First bytes of each block's float16 numbers."""
ROWS, COLUMNS = 32, 512


def random_rows(kind: str, seed: int) -> np.ndarray[Any, Any]:
    """Random bytes with finite scales of a common size, `(ROWS, bytes of a row)`."""
    random = np.random.default_rng(seed)
    num_weights, num_bytes = block_size(kind)
    blocks = random.integers(0, 256, (ROWS * COLUMNS // num_weights, num_bytes), dtype=np.uint8)
    for start in HALVES.get(kind, ()):
        scales = random.normal(0, 0.01, len(blocks)).astype(np.float16)
        blocks[:, start : start + 2] = scales.view(np.uint8).reshape(-1, 2)
    if kind not in HALVES:
        dtype = {"F32": np.float32, "F16": np.float16}.get(kind)
        weights = random.normal(0, 0.02, ROWS * COLUMNS)
        if dtype is not None:
            blocks = weights.astype(dtype).view(np.uint8)
        else:
            blocks = torch.tensor(weights).bfloat16().view(torch.uint8).numpy()
    return blocks.reshape(ROWS, -1)


@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 2**32 - 1))
def test_decode_blocks__is_gguf_bit_by_bit(kind: str, seed: int) -> None:
    raw = random_rows(kind, seed)
    expected = quants.dequantize(raw, GGMLQuantizationType[kind]).reshape(-1)
    weights = decode_blocks(kind, torch.from_numpy(raw).view(-1)).float()
    assert torch.equal(weights, torch.from_numpy(expected))


@pytest.mark.parametrize("kind", FOUR_BITS)
@given(seed=st.integers(0, 2**32 - 1))
def test_read_integers__keeps_integers_and_rounds_scale_and_offset(kind: str, seed: int) -> None:
    raw = random_rows(kind, seed)
    exact = torch.from_numpy(quants.dequantize(raw, GGMLQuantizationType[kind])).view(-1, 32)
    integers = read_integers(kind, torch.from_numpy(raw).view(-1))
    assert integers.zeros is not None
    scale, offset = integers.scales.float()[:, None], integers.zeros.float()[:, None]
    steps = integers.values.view(-1, 32).float() - MIDDLE
    # bfloat16 has 8 bits: half a unit in the last place of each of the two numbers.
    bound = 2**-8 * (steps.abs() * scale.abs() + offset.abs()) + 1e-8
    assert bool(((steps * scale + offset - exact).abs() <= bound).all())


@pytest.mark.parametrize("kind", ["Q5_0", "Q5_1", "Q8_0", "Q5_K", "Q6_K"])
@given(seed=st.integers(0, 2**32 - 1))
def test_repack__rounds_to_half_a_step_of_the_row(kind: str, seed: int) -> None:
    raw = random_rows(kind, seed)
    exact = torch.from_numpy(quants.dequantize(raw, GGMLQuantizationType[kind]))
    coding = choose_coding(kind, ROWS, COLUMNS)
    integers = repack(kind, torch.from_numpy(raw).view(-1), coding, torch.float32)
    assert isinstance(integers, Integers)
    steps = integers.scales[:, None]
    assert torch.allclose(steps[:, 0], exact.abs().amax(1) / 127)
    error = (integers.values.view(ROWS, COLUMNS).float() * steps - exact).abs()
    assert bool((error <= steps * 0.5001).all())


@pytest.mark.parametrize(
    ("kind", "shape", "bits"),
    [
        ("Q4_K", (48, 256), 4),
        ("Q4_0", (40, 256), 0),  # The kernel takes a multiple of 16 rows.
        ("Q6_K", (40, 256), 8),
        ("BF16", (48, 256), 0),
    ],
)
def test_choose_coding__depends_on_type_and_shape(
    kind: str, shape: tuple[int, int], bits: int
) -> None:
    assert choose_coding(kind, *shape).bits == bits


def test_repack__a_matrix_that_no_kernel_takes_stays_as_weights() -> None:
    raw = random_rows("Q4_0", 0)
    weights = repack("Q4_0", torch.from_numpy(raw).view(-1), RAW, torch.bfloat16)
    expected = quants.dequantize(raw, GGMLQuantizationType.Q4_0).reshape(-1)
    assert torch.equal(weights, torch.from_numpy(expected))
