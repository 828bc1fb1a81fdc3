"""Experts' rows in a GGUF file, and how they lie in a slot."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from runtime.errors import CheckpointError
from runtime.store.base import as_memoryview
from runtime.store.conversion import measure_peak_bytes
from runtime.store.files import FileReader
from runtime.store.gguf.blocks import (
    DTYPES,
    FOUR_BITS,
    GROUP_SIZE,
    count_bytes,
    decode_blocks,
    read_integers,
)
from runtime.store.gguf.header import GgufHeader, GgufTensor
from runtime.store.packed.blocks import DEFAULT_BLOCK, fits, native_block
from runtime.store.packed.coding import RAW, Coding, Integers
from runtime.store.packed.quantise import quantise
from runtime.store.repacked import ForeignLayer, ForeignRows
from runtime.store.weight_plan import FusedParameter

SOURCES = {
    "gate_up_proj": (("ffn_gate_exps", "ffn_up_exps"), ("ffn_gate_up_exps",)),
    "down_proj": (("ffn_down_exps",),),
}
"""Names of the tensors that a parameter's rows come from, in order; the first that a file has."""


STEP = 1 << 16
"""Weights that are rounded to other integers at once, to bound the memory that it takes."""


@dataclass(frozen=True)
class GgufRows(ForeignRows):
    """The rows of one tensor `(experts, rows, columns)`."""

    tensor: GgufTensor
    files: FileReader
    dtype: torch.dtype
    """The dtype of the parameter."""

    def read(self, expert: int) -> Integers | Tensor:
        tensor = self.tensor
        raw = torch.empty(tensor.num_bytes // tensor.shape[0], dtype=torch.uint8)
        offset = tensor.offset + expert * raw.numel()
        self.files.read(tensor.file, offset, as_memoryview(raw), what=tensor.name)
        return repack(tensor.kind, raw, self.coding, self.dtype)

    @property
    def scratch_bytes(self) -> int:
        num_bytes = self.tensor.num_bytes // self.tensor.shape[0]
        return num_bytes + _measure_repacking(self.tensor.kind, num_bytes, self.coding, self.dtype)


def repack(kind: str, raw: Tensor, coding: Coding, dtype: torch.dtype) -> Integers | Tensor:
    """Return whole rows of a type, uint8, as they lie in a slot with this coding."""
    if coding.block:
        return read_integers(kind, raw)
    if coding == RAW:
        return decode_blocks(kind, raw)
    row_bytes = count_bytes(kind, (coding.group_size,))
    parts = [
        quantise(coding, decode_blocks(kind, rows).to(dtype))
        for rows in raw.split(max(1, STEP // coding.group_size) * row_bytes)
    ]
    values, scales = torch.cat([p.values for p in parts]), torch.cat([p.scales for p in parts])
    return Integers(values, scales, None)


@cache
def _measure_repacking(kind: str, num_bytes: int, coding: Coding, dtype: torch.dtype) -> int:
    raw = torch.zeros(num_bytes, dtype=torch.uint8)
    return measure_peak_bytes(lambda: repack(kind, raw, coding, dtype))


def choose_coding(kind: str, num_rows: int, num_columns: int) -> Coding:
    """Return how rows of a type lie in a slot.

    A kernel multiplies integers of four bits in groups, and those of eight bits with one scale for
    each row: types of five, six and eight bits are rounded to these.
    """
    if kind in DTYPES:
        return RAW
    if kind not in FOUR_BITS:
        return Coding(8, num_columns)
    if not fits(num_rows, num_columns, GROUP_SIZE):
        return RAW
    return Coding(4, GROUP_SIZE, block=native_block() or DEFAULT_BLOCK)


def plan_layer(
    header: GgufHeader,
    block: int,
    parameters: Mapping[str, FusedParameter],
    files: FileReader,
) -> ForeignLayer:
    """Return where the experts of a layer are.

    Args:
        block: number of the layer in the file.
        parameters: the experts' parameters by name.

    Raises:
        CheckpointError: a tensor is missing, or of another shape than the metadata say.
    """
    rows = [
        part
        for name, parameter in parameters.items()
        for part in _plan_parameter(header, block, parameter, files)
    ]
    return ForeignLayer(
        shapes={name: parameter.shape[1:] for name, parameter in parameters.items()},
        dtypes={name: parameter.dtype for name, parameter in parameters.items()},
        rows=rows,
        num_experts=max(parameter.num_experts for parameter in parameters.values()),
    )


def _plan_parameter(
    header: GgufHeader, block: int, parameter: FusedParameter, files: FileReader
) -> list[GgufRows]:
    tensors = _find_tensors(header, block, parameter)
    num_experts, num_rows, num_columns = parameter.shape
    stored = sum(tensor.shape[-2] for tensor in tensors)
    for tensor in tensors:
        if (tensor.shape[0], stored, tensor.shape[-1]) != (num_experts, num_rows, num_columns):
            raise CheckpointError(
                f"{header.file}: {tensor.name} is {tensor.shape}; by the metadata, "
                f"{parameter.name} of a layer is {parameter.shape}"
            )
    parts, first = [], 0
    for tensor in tensors:
        shape = tensor.shape[1:]
        coding = choose_coding(tensor.kind, *shape)
        part = GgufRows(
            parameter.name, first, math.prod(shape), coding, tensor, files, parameter.dtype
        )
        parts.append(part)
        first += part.num_weights
    return parts


def _find_tensors(header: GgufHeader, block: int, parameter: FusedParameter) -> list[GgufTensor]:
    for names in SOURCES.get(parameter.name, ()):
        keys = [f"blk.{block}.{name}.weight" for name in names]
        if all(len(header.tensors[key].shape) == 3 for key in keys if key in header.tensors) and (
            set(keys) <= set(header.tensors)
        ):
            return [header.tensors[key] for key in keys]
    raise CheckpointError(
        f"{header.file}: no tensors for {parameter.name} of layer {block} "
        f"(blk.{block}.*_exps.weight)"
    )


def describe_coding(coding: Coding) -> str:
    if not coding.bits:
        return "as weights"
    groups = f"each {coding.group_size} weights" if coding.block else "each row"
    return f"as int{coding.bits} with a scale for {groups}"


def describe_layers(layers: Sequence[ForeignLayer]) -> list[str]:
    """Describe how the experts' tensors of each type are held."""
    held: dict[tuple[str, str], None] = {}
    for rows in (rows for layer in layers for rows in layer.rows):
        assert isinstance(rows, GgufRows)
        held[rows.tensor.kind, describe_coding(rows.coding)] = None
    return [f"{kind} experts are held {how}" for kind, how in held]
