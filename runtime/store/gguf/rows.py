"""Tensors of a GGUF file, and plans of the experts that they hold; slots hold rows as they are.

The functions named in `architectures.yaml` undo what llama.cpp's converter does to
tensors. Each takes the configuration and the stored tensors, in float32.
"""

import math
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from runtime.errors import CheckpointError
from runtime.store.base import as_memoryview
from runtime.store.files import FileReader
from runtime.store.ggml.library import PLAIN, TYPES, decode_rows
from runtime.store.gguf.architectures import read_translation
from runtime.store.gguf.header import GgufHeader, GgufTensor
from runtime.store.packed.coding import RAW, Coding
from runtime.store.tensor_index import StoredTensor
from runtime.store.weight_plan import FusedParameter, WeightPlan

BIAS = "_bias"
"""End of the name of a parameter that is the bias of another's."""
STEP = 1 << 22
"""Weights that are decoded at once: 16 MiB as float32."""


@dataclass(frozen=True)
class GgufRows(StoredTensor):
    """A tensor of a GGUF file; its dtype is uint8 where it consists of blocks."""

    ggml_type: str

    @classmethod
    def of(cls, tensor: GgufTensor) -> Self:
        dtype = PLAIN.get(tensor.kind, torch.uint8)
        place = tensor.file, tensor.offset, tensor.num_bytes
        return cls(*place, dtype, tensor.shape, tensor.name, tensor.kind)

    @property
    def kind(self) -> tuple[object, ...]:
        return *super().kind, self.ggml_type

    def choose_coding(self) -> Coding:
        is_plain = self.ggml_type in PLAIN or len(self.shape) < 2
        return RAW if is_plain else Coding(self.ggml_type)

    def load(self, files: FileReader, dtype: torch.dtype = torch.float32) -> Tensor:
        """Read the weights, `STEP` at a time; raises TransferError."""
        *leading, num_columns = self.shape
        row_bytes = TYPES[self.ggml_type].row_bytes(num_columns)
        weights = torch.empty(math.prod(leading), num_columns, dtype=dtype)
        offset = self.offset
        for rows in weights.split(max(1, STEP // num_columns)):
            raw = torch.empty(len(rows) * row_bytes, dtype=torch.uint8)
            files.read(self.file, offset, as_memoryview(raw), what=self.key)
            rows.view(-1).copy_(decode_rows(self.ggml_type, raw))
            offset += raw.numel()
        return weights.view(self.shape)

    def measure_filling(self, _coding: Coding = RAW) -> int:
        return self.num_bytes + 4 * math.prod(self.shape)


def plan_experts(header: GgufHeader, block: int, parameter: FusedParameter) -> WeightPlan:
    """Return how the experts' parameter of a layer is read.

    Args:
        block: number of the layer in the file.

    Raises:
        CheckpointError: a tensor is missing, or of another shape than the metadata say.
    """
    kind = "bias" if parameter.name.endswith(BIAS) else "weight"
    known = read_translation().experts
    for names in known.get(parameter.name.removesuffix(BIAS), ()):
        tensors = [header.tensors.get(f"blk.{block}.{name}.{kind}") for name in names]
        found = [one for one in tensors if one and len(one.shape) == len(parameter.shape)]
        if len(found) < len(names):
            continue
        stored = sum(tensor.shape[1] for tensor in found)
        for tensor in found:
            if (tensor.shape[0], stored, *tensor.shape[2:]) != parameter.shape:
                raise CheckpointError(
                    f"{header.file}: {tensor.name} is {tensor.shape}; by the metadata, "
                    f"{parameter.name} of a layer is {parameter.shape}"
                )
        return WeightPlan(parameter, {one.name: [GgufRows.of(one)] for one in found})
    raise CheckpointError(
        f"{header.file}: no tensors for {parameter.name} of layer {block} "
        f"(blk.{block}.*_exps.{kind})"
    )


def subtract_one(_config: PreTrainedConfig, weights: Tensor) -> Tensor:
    return weights - 1


def log_negative(_config: PreTrainedConfig, weights: Tensor) -> Tensor:
    return torch.log(-weights)


def join_rows(_config: PreTrainedConfig, *weights: Tensor) -> Tensor:
    return torch.cat(weights)


def split_pairs(config: PreTrainedConfig, rows: Tensor) -> Tensor:
    """Put the first halves of the pairs of rows that rotate together before the second ones."""
    pairs = rows.reshape(-1, config.head_dim // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


def join_latent(_config: PreTrainedConfig, keys: Tensor, values: Tensor | None = None) -> Tensor:
    """Join each head's rows for keys, stored transposed, and for values (DeepSeek).

    Older files have them as they are.
    """
    if values is None:
        return keys
    return torch.cat([keys.transpose(1, 2), values], 1).flatten(0, 1)


def join_key_heads(config: PreTrainedConfig, qkv: Tensor, gates: Tensor | None = None) -> Tensor:
    """Put the rows of a key head together: its query, key, values and gates (Qwen3-Next).

    Older files have them so.
    """
    if gates is None:
        return qkv
    heads = config.linear_num_key_heads
    size = heads * config.linear_key_head_dim
    parts = [*qkv.split([size, size, len(qkv) - 2 * size]), gates]
    return torch.cat([part.view(heads, -1, part.shape[-1]) for part in parts], 1).flatten(0, 1)


def group_rows(config: PreTrainedConfig, rows: Tensor) -> Tensor:
    """Put the value heads of a key head together; stored are the first of all, then the second."""
    heads = config.linear_num_key_heads
    tiled = rows.reshape(config.linear_num_value_heads // heads, heads, -1)
    return tiled.transpose(0, 1).reshape(rows.shape)


def group_value_rows(config: PreTrainedConfig, rows: Tensor) -> Tensor:
    """As `group_rows`, after the rows of queries and keys."""
    size = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    return torch.cat([rows[:size], group_rows(config, rows[size:])])


def group_columns(config: PreTrainedConfig, columns: Tensor) -> Tensor:
    return group_rows(config, columns.T).T


def log_negative_of_groups(config: PreTrainedConfig, weights: Tensor) -> Tensor:
    return torch.log(-group_rows(config, weights))
