"""Measures what repacking rounds, for the log."""

from collections.abc import Sequence

import torch
from torch import Tensor

from runtime.store.base import as_memoryview
from runtime.store.gguf.blocks import count_bytes, decode_blocks
from runtime.store.gguf.rows import GgufRows, repack
from runtime.store.packed.coding import Coding, decode, encode
from runtime.store.repacked import ForeignLayer

SAMPLED_ROWS = 64
"""Rows of a tensor that are measured: 100,000 weights, and a hundred kilobytes."""


def measure_rounding(rows: GgufRows) -> float:
    """Return the relative error of what a slot holds, on rows of the first expert.

    It is the root of the sum of squared errors, over that of squared weights.

    Raises:
        TransferError: the rows cannot be read.
    """
    tensor = rows.tensor
    shape = min(SAMPLED_ROWS, tensor.shape[-2]), tensor.shape[-1]
    raw = torch.empty(count_bytes(tensor.kind, shape), dtype=torch.uint8)
    rows.files.read(tensor.file, tensor.offset, as_memoryview(raw), what=tensor.name)
    weights = decode_blocks(tensor.kind, raw).float()
    stored = repack(tensor.kind, raw, rows.coding, rows.dtype)
    if isinstance(stored, Tensor):
        result = stored.to(rows.dtype)
    else:
        slot = torch.empty(rows.coding.num_bytes(len(weights), rows.dtype), dtype=torch.uint8)
        encode(rows.coding, stored, slot, num_columns=shape[1])
        result = torch.empty(len(weights), dtype=torch.float32)
        if rows.coding.block:
            decode(rows.coding, slot, result, num_columns=shape[1])
        else:
            result = torch.empty(len(weights), dtype=rows.dtype)
            decode(rows.coding, slot, result)
    size = weights.norm().item()
    return (result.float() - weights).norm().item() / size if size else 0.0


def describe_coding(coding: Coding) -> str:
    if not coding.bits:
        return "as weights"
    groups = f"each {coding.group_size} weights" if coding.block else "each row"
    return f"as int{coding.bits} with a scale for {groups}"


def describe_rounding(layers: Sequence[ForeignLayer]) -> list[str]:
    """Describe how the experts' tensors of each type are held, and the error that this makes."""
    first: dict[tuple[str, bool], GgufRows] = {}
    for rows in (rows for layer in layers for rows in layer.rows):
        assert isinstance(rows, GgufRows)
        first.setdefault((rows.tensor.kind, rows.coding.bits > 0), rows)
    lines = []
    for (kind, _), rows in first.items():
        error = measure_rounding(rows)
        exact = "exact" if error == 0 else f"relative error {error:.2%}"
        lines.append(f"{kind} experts are held {describe_coding(rows.coding)}: {exact}")
    return lines
