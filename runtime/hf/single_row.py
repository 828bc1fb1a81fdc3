"""Products of a single row in bfloat16 on a CPU: to the last bit PyTorch's, in less time.

PyTorch's own kernel for a single row, which steps of one token take (`runtime.hf.decode_step`),
gets half of what memory gives a thread; `bfloat16.h` sums in the same order, fetches ahead, takes
all experts of a layer that are ready in one call, and has threads whose number changes no bit.

It is used where its bits are seen to be PyTorch's, for every number of columns once: on random
rows, and on rows that show in which order they are summed.

Shape suffixes: M matrices, N rows of weights, K columns.
"""

from collections.abc import Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runtime.store.ggml.matrix import count_threads

try:
    from runtime.store.ggml.products import multiply_bfloat16
except ImportError:  # installed without compiled code, or with that of an earlier version
    multiply_bfloat16 = None  # type: ignore[assignment]

LEAST_ROWS = 16
"""A matrix of fewer rows, such as a gate, is left to PyTorch, which may treat it as a vector."""
LEAST_WEIGHTS = 1 << 17
"""A linear layer of fewer weights is left to PyTorch: they are in a cache, and calls cost more."""
TRIED_ROWS = 256
"""Rows of each of the two matrices on which bits are compared."""
TRIED_ENDS = (64, 32, 16)
"""Columns at the end, where vectors may be left over that are summed otherwise."""
ABSORBING = 2.0**40
"""A number by which float32 loses what is added to it."""


def multiply_rows(
    x: Tensor, weights: Sequence[Tensor], bias: Tensor | None = None
) -> Tensor | None:
    """Return `F.linear` of one row of `x` with each matrix.

    Args:
        x: bfloat16, `(1, K)` for all matrices, or `(M, K)`.
        weights: M matrices `(N, K)`.
        bias: `(N,)`.

    Returns:
        `(M, N)`; None: PyTorch has to multiply, because it would with other bits than these or with
        an error, or because gradients are wanted.
    """
    shape = weights[0].shape
    if (
        multiply_bfloat16 is None
        or x.dtype is not torch.bfloat16
        or not x.is_cpu
        or torch.is_grad_enabled()
        or torch.backends.mkldnn.enabled
        or len(shape) != 2
        or shape[0] < LEAST_ROWS
        or shape[1] != x.shape[1]
        or not all(weight.shape == shape and _is_readable(weight) for weight in weights)
        or not (bias is None or (bias.shape == shape[:1] and _is_readable(bias)))
        or not _has_equal_bits(shape[1], bias is not None)
    ):
        return None
    return _multiply(x.contiguous(), weights, bias)


def _is_readable(tensor: Tensor) -> bool:
    return tensor.is_cpu and tensor.dtype is torch.bfloat16 and tensor.is_contiguous()


def _multiply(x: Tensor, weights: Sequence[Tensor], bias: Tensor | None) -> Tensor | None:
    num_rows, num_columns = weights[0].shape
    y_MN = x.new_empty(len(weights), num_rows)
    is_done = multiply_bfloat16(
        [weight.data_ptr() for weight in weights],
        num_rows,
        num_columns,
        x.data_ptr(),
        len(x),
        0 if bias is None else bias.data_ptr(),
        y_MN.data_ptr(),
        count_threads(),
    )
    return y_MN if is_done else None


@cache
def _has_equal_bits(num_columns: int, has_bias: bool) -> bool:
    """Compare with PyTorch's kernel; oneDNN is off.

    Sums in another order mostly round to the same bfloat16. So two numbers in each row of the
    second matrix are a huge one and its negative: what was added to one of them before they met is
    lost from the sum.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.device("cpu"):
        x_MK = torch.randn(2, num_columns, generator=generator)
        rows_MNK = torch.randn(2, TRIED_ROWS, num_columns, generator=generator)
        ends_4 = torch.tensor((num_columns, *TRIED_ENDS)).clamp(max=num_columns)
        shares_2N = torch.rand(2, TRIED_ROWS, generator=generator)
        places_2N = num_columns - 1 - (shares_2N * ends_4.repeat(TRIED_ROWS // 4)).long()
    x_MK[1] = 1
    for place_N, value in zip(places_2N, (ABSORBING, -ABSORBING), strict=True):
        rows_MNK[1].scatter_(1, place_N[:, None], value)
    x_MK, rows_MNK = x_MK.bfloat16(), rows_MNK.bfloat16()
    bias = rows_MNK[0, :, 0].contiguous() if has_bias else None
    y_MN = _multiply(x_MK, list(rows_MNK), bias)
    expected = [
        F.linear(x_1K, rows_NK, bias) for x_1K, rows_NK in zip(x_MK.split(1), rows_MNK, strict=True)
    ]
    return y_MN is not None and torch.equal(y_MN, torch.cat(expected))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `F.linear(x, weight, bias)`, of a single row by our kernel where that is possible."""
    num_columns = x.shape[-1]
    # PyTorch adds a bias to a row that is not contiguous afterwards, and rounds twice.
    if x.numel() == num_columns and (bias is None or x.is_contiguous()):
        y_1N = multiply_rows(x.reshape(1, num_columns), (weight,), bias)
        if y_1N is not None:
            return y_1N.view(*x.shape[:-1], len(weight))
    return F.linear(x, weight, bias)


class SingleRowLinear(nn.Linear):
    """A linear layer that multiplies single rows by our kernel."""

    def forward(self, input: Tensor) -> Tensor:  # named as the library names it
        return linear(input, self.weight, self.bias)


def convert_linears(model: nn.Module) -> None:
    """Let large linear layers of a model multiply single rows by our kernel; no bit changes."""
    for module in model.modules():
        # Not by its weight: an expert's is fetched when it is looked at.
        is_large = type(module) is nn.Linear and (
            module.in_features * module.out_features >= LEAST_WEIGHTS
        )
        if is_large:
            module.__class__ = SingleRowLinear
