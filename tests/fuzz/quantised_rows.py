"""Rows of ggml's types, multiplied and decoded whatever their bytes are.

Shape suffixes: T tokens, N rows, K columns.
"""

import torch

from runtime.store.ggml.library import TYPES, decode_rows, find_products, multiplies
from runtime.store.ggml.matrix import RowMatrix, RowsPart

HEADER = 8
"""Bytes before those of the rows: type, columns, tokens, and pairs of tokens and experts."""
TOP_K = 2
MOST_ROWS = 64


def compute(data: bytes) -> None:
    """Multiplies the rows as a dense layer and as the gates and ups of experts, and decodes them.

    Raises:
        ValueError: pairs that there are not.
    """
    kind = sorted(TYPES)[data[0] % len(TYPES)] if len(data) > HEADER else "F32"
    # Kernels take up to eight blocks at once.
    num_columns = TYPES[kind].block * (1 + data[1] % 10) if len(data) > HEADER else 1
    row_bytes = TYPES[kind].row_bytes(num_columns)
    num_rows = min((len(data) - HEADER) // row_bytes, MOST_ROWS) & ~1
    if num_rows < 2:
        return
    content = bytearray(data[HEADER : HEADER + num_rows * row_bytes])
    rows = torch.frombuffer(content, dtype=torch.uint8)
    decode_rows(kind, rows)
    if not multiplies(kind):
        return
    matrix = RowMatrix([RowsPart(kind, 0, num_rows)], num_columns)
    x_TK = torch.randn(1 + data[2] % 5, num_columns, generator=torch.Generator().manual_seed(0))
    alone_N = matrix.linear(rows, x_TK[-1:])[0]
    assert torch.equal(matrix.linear(rows, x_TK)[-1].view(torch.int32), alone_N.view(torch.int32))
    _compute_experts(rows, matrix, x_TK, pairs=data[3:HEADER])


def _compute_experts(rows: torch.Tensor, up: RowMatrix, x_TK: torch.Tensor, pairs: bytes) -> None:
    """Computes an expert whose slot ends with the last byte of its weights down."""
    products, num_tokens = find_products(), len(x_TK)
    assert products is not None
    down_NK = torch.ones(x_TK.shape[1], up.num_rows // 2)
    # As in slots, each part begins at a multiple of 4 bytes.
    padded = torch.cat([rows, torch.zeros(-len(rows) % 4, dtype=torch.uint8)])
    slot = torch.cat([padded, down_NK.view(torch.uint8).view(-1)])
    down = RowMatrix([RowsPart("F32", len(padded), len(down_NK))], down_NK.shape[1])
    results = torch.zeros(num_tokens * TOP_K, len(down_NK))
    products.compute(
        up.parts, up.num_columns, down.parts, [slot.data_ptr()], [list(pairs)], TOP_K, num_tokens,
        x_TK.data_ptr(), results.data_ptr(), 2,
    )  # fmt: skip
