"""Int4 matrices in the order in which PyTorch's kernels for CPUs read them.

`torch.ops.aten._weight_int4pack_mm_for_cpu` computes with

    w = (q - 8) * scale + offset     q 0..15, two to a byte; scale and offset of a group, bfloat16

Rows are in blocks; of each block, the bytes of one column follow those of the column before. A byte
of a whole block holds a row of the first half and, in its high half, the row as far into the second
half. A last block of fewer rows has two rows side by side in each byte. A whole block has 64 rows
where kernels use AVX-512 and 32 where they use AVX2, so that a store has to be packed for its
processor; on others it is decoded. Scales and offsets are `[groups of a row, rows, 2]`.

Shape suffixes: N rows, K columns, G groups of a row.
"""

from functools import cache

import torch
from torch import Tensor

BLOCKS = {"AVX512": 64, "AVX2": 32}
"""Rows of a whole block, by PyTorch's name of the processor's abilities."""
DEFAULT_BLOCK = 64
"""Rows of a block in stores that are packed where there is no such kernel."""
ROW_STEP = 16
"""The kernel takes a multiple of these rows."""
GROUP_SIZES = (32, 64, 128, 256)
"""Group sizes of the kernel."""
MIDDLE = 8


@cache
def native_block() -> int | None:
    """Returns the rows of a block of this processor's kernel; None if it has none."""
    return BLOCKS.get(torch.backends.cpu.get_cpu_capability())


def fits(num_rows: int, num_columns: int, group_size: int) -> bool:
    """Returns whether a matrix of this shape can be stored in blocks."""
    return num_rows % ROW_STEP == 0 and group_size in GROUP_SIZES and num_columns % group_size == 0


def to_blocks(values_NK: Tensor, block: int) -> Tensor:
    """Returns numbers 0..15, uint8, as the bytes `(N * K / 2,)`."""
    num_rows, num_columns = values_NK.shape
    whole = num_rows // block * block
    halves = values_NK[:whole].view(-1, 2, block // 2, num_columns)
    pairs = values_NK[whole:].view(-1, 2, num_columns)
    parts = [
        (halves[:, 0] | halves[:, 1] << 4).transpose(1, 2).reshape(-1),
        (pairs[:, 0] | pairs[:, 1] << 4).t().reshape(-1),
    ]
    return torch.cat(parts)


def from_blocks(stored: Tensor, num_rows: int, num_columns: int, block: int) -> Tensor:
    """Returns the numbers `(N, K)`, uint8, that `to_blocks` has stored."""
    whole = num_rows // block * block
    values_NK = torch.empty((num_rows, num_columns), dtype=torch.uint8, device=stored.device)
    halves = stored[: whole * num_columns // 2].view(-1, num_columns, block // 2).transpose(1, 2)
    pairs = stored[whole * num_columns // 2 :].view(num_columns, -1).t()
    for half, values in ((0, (halves & 15, pairs & 15)), (1, (halves >> 4, pairs >> 4))):
        values_NK[:whole].view(-1, 2, block // 2, num_columns)[:, half] = values[0]
        values_NK[whole:].view(-1, 2, num_columns)[:, half] = values[1]
    return values_NK


def decode_blocks(stored: Tensor, scales_GN2: Tensor, shape: tuple[int, int], block: int) -> Tensor:
    """Returns the weights `(N, K)` in float32."""
    num_rows, num_columns = shape
    values_NK = from_blocks(stored, num_rows, num_columns, block)
    groups_NGS = values_NK.view(num_rows, len(scales_GN2), -1).float().sub_(MIDDLE)
    scale_NG1, offset_NG1 = scales_GN2.float().permute(2, 1, 0)[..., None]
    return groups_NGS.mul_(scale_NG1).add_(offset_NG1).view(shape)
