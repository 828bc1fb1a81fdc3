"""Matrix products on a CPU with the bits of PyTorch: in less time, or with less memory.

A single row in bfloat16 or float32: the kernels that PyTorch has for steps of one token (its own,
`runtime.hf.decode_step`, and on processors of AMD an old one of MKL's with one thread) get half of
what memory gives a thread; `single_row.h` sums in the same order, fetches ahead, takes all experts
of a layer that are ready in one call, and has threads whose number changes no bit. It is used where
its bits are seen to be PyTorch's, for matrices of every size once: on random rows, and on rows that
show in which order they are summed.

Several rows in bfloat16 or float16: on processors with AVX-512, PyTorch leaves them to oneDNN,
which compiles each product anew for each number of rows, in .3 ms and .3 MiB that it keeps. A
prompt of 1,900 tokens has experts with 270 different numbers. They are rounded up by rows of zeros,
where the other rows are seen not to change by that. With AMX they are not: oneDNN chooses there
among more ways to divide the sums.

Shape suffixes: M matrices or rows of `x`, N rows of weights, K columns.
"""

from collections.abc import Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runtime.store.ggml.matrix import count_threads

try:
    from runtime.store.ggml.products import multiply_row
except ImportError:  # installed without compiled code, or with that of an earlier version
    multiply_row = None  # type: ignore[assignment]

LEAST_ROWS = 16
"""A matrix of fewer rows, such as a gate, is left to PyTorch, which may treat it as a vector."""
LEAST_WEIGHTS = 1 << 17
"""A linear layer of fewer weights is left to PyTorch: they are in a cache, and calls cost more."""
TRIED_ROWS = 256
"""Rows of each of the two matrices on which bits are compared."""
TRIED_WEIGHTS = 1 << 20
"""Weights of each, if that is more."""
TRIED_ENDS = (64, 32, 16)
"""Columns at the end, where vectors may be left over that are summed otherwise."""
TURN = 64
"""Columns after which kernels come back to the same sum: some pairs are in one and the same."""
ABSORBING = 2.0**40
"""A number by which float32 loses what is added to it."""
HALF = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
"""Dtypes, and PyTorch's function for whether oneDNN multiplies them on this processor."""
SINGLE_ROWS = (torch.bfloat16, torch.float32)
"""Dtypes of which there is a kernel for one row."""
SIZES_PER_OCTAVE = 8
"""Numbers of rows from one to its double: the rows added take some 2 % of a product's time."""
LEAST_ROUNDED = 2 * SIZES_PER_OCTAVE
MOST_WEIGHTS = 1 << 25
"""Larger matrices, such as those of a vocabulary, are few, and a copy to compare bits is large."""
TRIED_SIZES = (17, 33, 65, 129)
"""Numbers of rows on which bits are compared with those of the next size."""


def multiply_rows(
    x: Tensor, weights: Sequence[Tensor], bias: Tensor | None = None
) -> Tensor | None:
    """Return `F.linear` of one row of `x` with each matrix.

    Args:
        x: bfloat16 or float32, `(1, K)` for all matrices, or `(M, K)`.
        weights: M matrices `(N, K)`.
        bias: `(N,)`.

    Returns:
        `(M, N)`; None: PyTorch has to multiply, because it would with other bits than these or with
        an error, or because gradients are wanted.
    """
    shape, dtype = weights[0].shape, x.dtype
    if (
        multiply_row is None
        or dtype not in SINGLE_ROWS
        or not x.is_cpu
        or len(shape) != 2
        or shape[0] < LEAST_ROWS
        or shape[1] != x.shape[1]
        or torch.is_grad_enabled()
    ):
        return None
    # Not by a function for each: a step of one token does this for every expert.
    for weight in weights:
        if weight.shape != shape or weight.dtype is not dtype:
            return None
        if not (weight.is_cpu and weight.is_contiguous()):
            return None
    if bias is not None and not (
        bias.shape == shape[:1] and bias.dtype is dtype and bias.is_cpu and bias.is_contiguous()
    ):
        return None
    if dtype is torch.float32:
        is_onednn = torch.get_float32_matmul_precision() != "highest"
    else:
        is_onednn = torch.backends.mkldnn.enabled
    if is_onednn or not _has_equal_bits(*shape, dtype, bias is not None, torch.get_num_threads()):
        return None
    return _multiply(x.contiguous(), weights, bias)


def _multiply(x: Tensor, weights: Sequence[Tensor], bias: Tensor | None) -> Tensor | None:
    num_rows, num_columns = weights[0].shape
    y_MN = x.new_empty(len(weights), num_rows)
    is_done = multiply_row(
        [weight.data_ptr() for weight in weights],
        num_rows,
        num_columns,
        x.data_ptr(),
        len(x),
        0 if bias is None else bias.data_ptr(),
        y_MN.data_ptr(),
        x.dtype is torch.float32,
        count_threads(),
    )
    return y_MN if is_done else None


@cache
def _has_equal_bits(
    num_rows: int, num_columns: int, dtype: torch.dtype, has_bias: bool, num_threads: int
) -> bool:
    """Compare with PyTorch's kernel, oneDNN left out.

    A large matrix is compared in part: a copy takes memory.

    Args:
        num_threads: PyTorch's; a part of the key, as the order of sums may depend on it.
    """
    assert num_threads == torch.get_num_threads()
    x_MK, rows_MNK = _draw_telling(num_columns, dtype)
    num_rows = min(num_rows, max(TRIED_ROWS, TRIED_WEIGHTS // num_columns))
    weights = [_repeat(rows_NK, num_rows) for rows_NK in rows_MNK]
    bias = weights[0][:, 0].contiguous() if has_bias else None
    y_MN = _multiply(x_MK, weights, bias)
    expected = [
        F.linear(x_1K, rows_NK, bias) for x_1K, rows_NK in zip(x_MK.split(1), weights, strict=True)
    ]
    return y_MN is not None and torch.equal(y_MN, torch.cat(expected))


def _repeat(rows: Tensor, num_rows: int) -> Tensor:
    return rows.repeat(-(-num_rows // len(rows)), 1)[-num_rows:]


def _draw_telling(num_columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a random row and one of ones, `(2, K)`, and a matrix for each, `(2, TRIED_ROWS, K)`.

    Sums in another order mostly round to the same number. So two numbers in each row of the second
    matrix are a huge one and its negative: what was added to one of them before they met is lost
    from the sum.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.device("cpu"):
        x_MK = torch.randn(2, num_columns, generator=generator)
        rows_MNK = torch.randn(2, TRIED_ROWS, num_columns, generator=generator)
        ends_4 = torch.tensor((num_columns, *TRIED_ENDS)).clamp(max=num_columns)
        shares_2N = torch.rand(2, TRIED_ROWS, generator=generator)
        places_2N = num_columns - 1 - (shares_2N * ends_4.repeat(TRIED_ROWS // 4)).long()
        turns_N = torch.randint(1, num_columns // TURN + 2, (TRIED_ROWS // 4,), generator=generator)
        places_2N[1, ::4] = (places_2N[0, ::4] + TURN * turns_N) % num_columns
    x_MK[1] = 1
    huge = torch.finfo(dtype).max if dtype is torch.float16 else ABSORBING
    for place_N, value in zip(places_2N, (huge, -huge), strict=True):
        rows_MNK[1].scatter_(1, place_N[:, None], value)
    return x_MK.to(dtype), rows_MNK.to(dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `F.linear(x, weight, bias)`: the same bits, as described above."""
    y_MN, num_columns = None, x.shape[-1]
    # PyTorch adds a bias to rows that are not contiguous afterwards, and rounds twice.
    if x.is_cpu and num_columns and (bias is None or x.is_contiguous()):
        x_MK = x.reshape(-1, num_columns)
        if len(x_MK) == 1:
            y_MN = multiply_rows(x_MK, (weight,), bias)
        # Of a transposed `x`, PyTorch sums in another order than of a copy.
        elif x.dtype in HALF and len(x_MK) > LEAST_ROUNDED and x.is_contiguous():
            y_MN = _multiply_rounded(x_MK, weight, bias)
    return F.linear(x, weight, bias) if y_MN is None else y_MN.view(*x.shape[:-1], len(weight))


def round_up(count: int) -> int:
    """Return the next of few sizes: all up to 16, and 8 from each power of two to the next."""
    step = 1 << max(0, count.bit_length() - SIZES_PER_OCTAVE.bit_length())
    return -(-count // step) * step


def _multiply_rounded(x_MK: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """Multiply with rows of zeros added; None: PyTorch has to multiply the rows as they are."""
    size = round_up(len(x_MK))
    if (
        size == len(x_MK)
        or weight.numel() > MOST_WEIGHTS
        or weight.dtype is not x_MK.dtype
        or not weight.is_contiguous()
        or weight.shape[1:] != x_MK.shape[1:]
        or torch.is_grad_enabled()
        or not (torch.backends.mkldnn.enabled and torch.backends.mkldnn.is_available())
        or not getattr(torch.ops.mkldnn, HALF[x_MK.dtype])()
        or torch.cpu._is_amx_tile_supported()
        or not _ignores_added_rows(
            *weight.shape, x_MK.dtype, bias is not None, torch.get_num_threads()
        )
    ):
        return None
    return _multiply_with(size, x_MK, weight, bias)


def _multiply_with(size: int, x_MK: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(F.pad(x_MK, (0, 0, 0, size - len(x_MK))), weight, bias)[: len(x_MK)]


@cache
def _ignores_added_rows(
    num_rows: int, num_columns: int, dtype: torch.dtype, has_bias: bool, num_threads: int
) -> bool:
    """Compare products of a matrix `(num_rows, num_columns)` with and without rows of zeros.

    Args:
        num_threads: PyTorch's; a part of the key, as the order of sums may depend on it.
    """
    assert num_threads == torch.get_num_threads()
    x_2K, rows_2NK = _draw_telling(num_columns, dtype)
    weight = _repeat(rows_2NK.flatten(0, 1), num_rows)
    bias = weight[:, 0].contiguous() if has_bias else None
    tried = [x_2K.repeat(size, 1)[:size] for size in TRIED_SIZES]
    return all(
        torch.equal(_multiply_with(round_up(len(x)), x, weight, bias), F.linear(x, weight, bias))
        for x in tried
    )


class OwnLinear(nn.Linear):
    """A linear layer that multiplies as `linear` does."""

    def forward(self, input: Tensor) -> Tensor:  # named as the library names it
        return linear(input, self.weight, self.bias)


def convert_linears(model: nn.Module) -> None:
    """Let large linear layers of a model multiply by `linear`; no bit changes."""
    for module in model.modules():
        # Not by its weight: an expert's is fetched when it is looked at.
        is_large = type(module) is nn.Linear and (
            module.in_features * module.out_features >= LEAST_WEIGHTS
        )
        if is_large:
            module.__class__ = OwnLinear
