"""Experts' rows in a GGUF file; a slot holds them as they are."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.errors import CheckpointError
from runtime.store.base import READERS, as_memoryview
from runtime.store.checkpoint import LayerSources, PartSource
from runtime.store.files import FileRange, FileReader
from runtime.store.ggml.library import PLAIN, decode_rows
from runtime.store.gguf.header import GgufHeader, GgufTensor
from runtime.store.packed.coding import RAW, Coding
from runtime.store.weight_plan import FusedParameter

SOURCES = {
    "gate_up_proj": (("ffn_gate_exps", "ffn_up_exps"), ("ffn_gate_up_exps",)),
    "down_proj": (("ffn_down_exps",),),
}
"""Names of the tensors that a parameter's rows come from, in order; the first that a file has."""
BIAS = "_bias"
"""End of the name of a parameter that is the bias of another's."""


@dataclass(frozen=True, kw_only=True)
class GgufRows(PartSource):
    """The rows of one tensor `(experts, rows, columns)`."""

    tensor: GgufTensor
    dtype: torch.dtype
    """The dtype of the parameter."""

    @property
    def is_as_stored(self) -> bool:
        return self.coding != RAW or PLAIN.get(self.tensor.kind) == self.dtype

    def read(self, expert: int, target: Tensor) -> None:
        file, offset, _ = self._find(expert)
        raw = target
        if not self.is_as_stored:
            raw = torch.empty(_expert_bytes(self.tensor), dtype=torch.uint8)
        self.files.read(file, offset, as_memoryview(raw), what=self.tensor.name)
        if not self.is_as_stored:
            target.view(self.dtype).copy_(decode_rows(self.tensor.kind, raw))

    def place(self, expert: int) -> FileRange | None:
        return self._find(expert) if self.is_as_stored else None

    def _find(self, expert: int) -> FileRange:
        offset = self.tensor.offset + expert * _expert_bytes(self.tensor)
        return FileRange(self.tensor.file, offset)


def _expert_bytes(tensor: GgufTensor) -> int:
    return tensor.num_bytes // tensor.shape[0]


def plan_layer(
    header: GgufHeader,
    block: int,
    parameters: Mapping[str, FusedParameter],
    files: FileReader,
) -> LayerSources:
    """Return where the experts of a layer are.

    Args:
        block: number of the layer in the file.
        parameters: the experts' parameters by name.

    Raises:
        CheckpointError: a tensor is missing, or of another shape than the metadata say.
    """
    rows = [
        part
        for parameter in parameters.values()
        for part in _plan_parameter(header, block, parameter, files)
    ]
    return LayerSources(list(parameters.values()), rows)


def _plan_parameter(
    header: GgufHeader, block: int, parameter: FusedParameter, files: FileReader
) -> list[GgufRows]:
    tensors = _find_tensors(header, block, parameter)
    num_experts, num_rows, *columns = parameter.shape
    stored = sum(tensor.shape[1] for tensor in tensors)
    for tensor in tensors:
        if (tensor.shape[0], stored, *tensor.shape[2:]) != (num_experts, num_rows, *columns):
            raise CheckpointError(
                f"{header.file}: {tensor.name} is {tensor.shape}; by the metadata, "
                f"{parameter.name} of a layer is {parameter.shape}"
            )
    parts, first = [], 0
    for tensor in tensors:
        count = math.prod(tensor.shape[1:])
        is_plain = tensor.kind in PLAIN or not columns
        is_cast = is_plain and PLAIN.get(tensor.kind) != parameter.dtype
        part = GgufRows(
            parameter.name,
            first,
            count,
            RAW if is_plain else Coding(tensor.kind),
            scratch_bytes=READERS * (_expert_bytes(tensor) + 4 * count) if is_cast else 0,
            tensor=tensor,
            files=files,
            dtype=parameter.dtype,
        )
        parts.append(part)
        first += count
    return parts


def _find_tensors(header: GgufHeader, block: int, parameter: FusedParameter) -> list[GgufTensor]:
    kind = "bias" if parameter.name.endswith(BIAS) else "weight"
    for names in SOURCES.get(parameter.name.removesuffix(BIAS), ()):
        tensors = [header.tensors.get(f"blk.{block}.{name}.{kind}") for name in names]
        found = [one for one in tensors if one and len(one.shape) == len(parameter.shape)]
        if len(found) == len(names):
            return found
    raise CheckpointError(
        f"{header.file}: no tensors for {parameter.name} of layer {block} "
        f"(blk.{block}.*_exps.{kind})"
    )


def describe_layers(layers: Sequence[LayerSources]) -> list[str]:
    """Describe how the experts' tensors of each type are held."""
    held: dict[tuple[str, str], None] = {}
    for rows in (rows for layer in layers for rows in layer.sources):
        assert isinstance(rows, GgufRows)
        held[rows.tensor.kind, "as they are" if rows.is_as_stored else "decoded"] = None
    return [f"{kind} experts are held {how}" for kind, how in held]
