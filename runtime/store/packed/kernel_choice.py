"""The matrices of integers that this machine multiplies without decoding them."""

import time
from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F

from runtime.store.packed.blocks import native_block
from runtime.store.packed.coding import Coding, decode
from runtime.store.packed.matrix import view_rows

ROWS, COLUMNS = 256, 1024
"""The matrix that is measured; one of int8 has a row for each group."""
REPETITIONS = 5
COLUMN_STEP = 16
"""The int8 kernel reads the columns in steps of 16, beyond the end of rows of another length."""


def has_kernel(coding: Coding, num_columns: int) -> bool:
    """Return whether a part of a matrix is multiplied as it is stored.

    The processor needs a kernel for it, and this must be faster than decoding before each use.
    """
    if coding.block:
        is_known = coding.block == native_block()
    else:
        is_row = coding.bits == 8 and coding.group_size == num_columns
        is_known = is_row and num_columns % COLUMN_STEP == 0 and native_block() is not None
    return is_known and measure_ratio(coding) >= 1


@cache
@torch.no_grad()
def measure_ratio(coding: Coding) -> float:
    """Return the time of one token's product after decoding over the time without.

    It is 3 to 30 where the kernel is vectorised, and far below 1 where PyTorch has only a loop, so
    that noise does not change the decision.
    """
    num_columns = COLUMNS if coding.block else coding.group_size
    num_weights = ROWS * num_columns
    stored = torch.zeros(coding.num_bytes(num_weights, torch.bfloat16), dtype=torch.uint8)
    row = torch.ones(1, num_columns, dtype=torch.bfloat16)
    matrix = view_rows(coding, stored, num_weights, num_columns, torch.bfloat16)
    decoded = torch.empty(ROWS, num_columns, dtype=torch.bfloat16)

    def multiply() -> None:
        matrix.multiply(row)

    def decode_first() -> None:
        decode(coding, stored, decoded.view(-1), num_columns=num_columns)
        F.linear(row, decoded)

    return measure_speedup(decode_first, multiply, repetitions=REPETITIONS)


def measure_speedup(
    usual: Callable[[], None], other: Callable[[], None], *, repetitions: int
) -> float:
    """Return the least time of one computation over that of another, tried in turns."""

    def seconds(compute: Callable[[], None]) -> float:
        start = time.perf_counter()
        compute()
        return time.perf_counter() - start

    pairs = [(seconds(usual), seconds(other)) for _ in range(repetitions)]
    least_usual, least_other = map(min, zip(*pairs, strict=True))
    return least_usual / least_other
