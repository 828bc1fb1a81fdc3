"""Loads models from GGUF files, without their experts, as Transformers does.

Configuration, names and conversions are Transformers' and gguf's own tables and functions. Their
loader is not used: it dequantises whole tensors, experts among them, and keeps a view of each word
of the vocabulary, which takes seconds and hundreds of megabytes.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.integrations.ggml import GGUF_CONFIG_DEFAULTS_MAPPING, GGUF_CONFIG_MAPPING
from transformers.integrations.gguf import (
    GGUF_ARCHS,
    GGUF_CONFIG_ARCHS,
    get_gguf_config,
    get_gguf_conversion_mapping,
    read_gguf_metadata,
)
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS

from runtime.errors import CheckpointError
from runtime.hf.layers import MoeLayer
from runtime.store.base import as_memoryview
from runtime.store.checkpoint import LayerSources
from runtime.store.files import FileReader
from runtime.store.ggml.library import PLAIN, TYPES, decode_rows
from runtime.store.gguf.header import EXPERTS, GgufHeader, GgufTensor, read_header
from runtime.store.gguf.rows import describe_layers, plan_layer
from runtime.store.weight_plan import FusedParameter

log = logging.getLogger(__name__)

MODEL_TYPES = {"minimax-m2": "minimax_m2", "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe"}
"""Transformers' names of architectures whose configuration it maps with `GGUF_CONFIG_MAPPING`."""
WIDTHS = {
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
"""Sizes that Transformers' mapping leaves at the defaults of one model of each family."""
ROPE_SCALING = {
    "type": "rope_type",
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
}
"""Names of the metadata `rope.scaling`, as Qwen3's files for 128 K tokens have them."""
SCORING = {0: "none", 1: "softmax", 2: "sigmoid"}
"""MiniMax-M2's scoring functions by llama.cpp's number, as Transformers names them."""
STEP = 1 << 22
"""Weights that are decoded at once: 16 MiB as float32."""


def read_gguf_config(file: Path) -> PreTrainedConfig:
    """Return the configuration that a file's metadata say.

    Raises:
        CheckpointError: they lack a value.
    """
    header = read_header(file)
    if header.architecture in GGUF_CONFIG_ARCHS:
        try:
            values = get_gguf_config(read_gguf_metadata(str(file))[0], tuple(header.tensors))
        except KeyError as error:
            raise CheckpointError(f"{file} is damaged: it has no {error}") from error
    else:
        values = map_metadata(header)
    # Transformers' mappings leave it out, and the model would compute unscaled.
    scaling = {
        name: value
        for key, name in ROPE_SCALING.items()
        if (value := header.metadata.get(f"{header.architecture}.rope.scaling.{key}")) is not None
    }
    if scaling.get("rope_type") in ("linear", "yarn"):
        values["rope_parameters"] = {**(values.get("rope_parameters") or {}), **scaling}
    return CONFIG_MAPPING[values["model_type"]].from_dict(values)


def map_metadata(header: GgufHeader) -> dict[str, Any]:
    """Return the configuration's values, as Transformers' table maps them."""
    model_type = MODEL_TYPES[header.architecture]
    values: dict[str, Any] = {
        "tie_word_embeddings": "output.weight" not in header.tensors,
        **GGUF_CONFIG_DEFAULTS_MAPPING.get(model_type, {}),
    }
    for key, value in header.metadata.items():
        group, _, rest = key.partition(".")
        if group == header.architecture:
            group = model_type
            if rest in WIDTHS and GGUF_CONFIG_MAPPING[group].get(rest, "") == "":
                values[WIDTHS[rest]] = value
        name = GGUF_CONFIG_MAPPING.get(group, {}).get(rest)
        if name is not None:
            values[name] = value
    values["model_type"] = model_type
    if "scoring_func" in values:
        values["scoring_func"] = SCORING.get(values["scoring_func"], "softmax")
    if "tokenizer.ggml.tokens" in header.metadata:
        values.setdefault("vocab_size", header.metadata["tokenizer.ggml.tokens"])
    if missing := {"hidden_size", "num_hidden_layers", "num_attention_heads"} - set(values):
        raise CheckpointError(f"{header.file} is damaged: it has no {', '.join(sorted(missing))}")
    return values


def choose_dtype(header: GgufHeader) -> torch.dtype:
    """Return the dtype of the file's weights; bfloat16, which kernels compute with, of blocks."""
    kinds = {tensor.kind for tensor in header.tensors.values()}
    if kinds <= set(PLAIN):
        return next(PLAIN[kind] for kind in ("BF16", "F16", "F32") if kind in kinds)
    return torch.bfloat16


Convert = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class StreamedTensor:
    """A tensor of the file that is read when Transformers fills the parameter."""

    tensor: GgufTensor
    files: FileReader
    shape: torch.Size
    dtype: torch.dtype
    convert: Convert | None
    """Undoes what llama.cpp's converter did, on all weights in float32."""

    def __getitem__(self, _: object) -> Tensor:
        *leading, num_columns = self.tensor.shape
        num_rows = math.prod(leading)
        step = num_rows if self.convert is not None else max(1, STEP // num_columns)
        parts = [
            self._read(first, min(step, num_rows - first)) for first in range(0, num_rows, step)
        ]
        weights = parts[0] if len(parts) == 1 else torch.cat(parts)
        # Of one row, some versions of the converter leave out the dimension.
        return weights.view(self.shape)

    def _read(self, first: int, num_rows: int) -> Tensor:
        tensor = self.tensor
        row_bytes = TYPES[tensor.kind].row_bytes(tensor.shape[-1])
        raw = torch.empty(num_rows * row_bytes, dtype=torch.uint8)
        offset = tensor.offset + first * row_bytes
        self.files.read(tensor.file, offset, as_memoryview(raw), what=tensor.name)
        weights = decode_rows(tensor.kind, raw)
        if self.convert is not None:
            weights = self.convert(weights.float().view(tensor.shape))
        return weights.to(self.dtype)


@contextmanager
def open_dense(header: GgufHeader, model: PreTrainedModel) -> Iterator[dict[str, StreamedTensor]]:
    """Open all tensors but the experts', by the model's names of them.

    Raises:
        CheckpointError: a tensor has another size than the parameter.
    """
    parameters = model.state_dict()
    names = (_rename if header.architecture in GGUF_ARCHS else _look_up)(header, model)
    files = FileReader()
    try:
        streamed = {}
        for name, (key, convert) in names.items():
            tensor, parameter = header.tensors[key], parameters[name]
            if math.prod(tensor.shape) != parameter.numel():
                raise CheckpointError(
                    f"{header.file}: {key} is {tensor.shape}; by the metadata, {name} is "
                    f"{tuple(parameter.shape)}"
                )
            streamed[name] = StreamedTensor(tensor, files, parameter.shape, model.dtype, convert)
        yield streamed
    finally:
        files.close()


Names = dict[str, tuple[str, Convert | None]]
"""By the model's name: the file's name, and what is to be done to the tensor."""


def _rename(header: GgufHeader, model: PreTrainedModel) -> Names:
    """Find names by Transformers' rules for the architecture."""
    # A copy, because matching a name changes rules.
    mapping = deepcopy(get_gguf_conversion_mapping(header.architecture, model.config))
    renamings = [rule for rule in mapping if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in mapping if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    parameters, names = model.state_dict(), Names()
    for key in header.tensors:
        if EXPERTS.search(key):
            continue
        name, pattern = rename_source_key(key, renamings, converters)
        if name in parameters:
            rule = None if pattern is None else by_pattern[pattern]
            names[name] = key, None if rule is None else partial(_convert, rule, name)
    return names


def _convert(rule: WeightConverter, name: str, weights: Tensor) -> Tensor:
    """Apply a rule's operations, all of which take and return one tensor."""
    for operation in rule.operations:
        (weights,) = operation.convert(
            {name: weights}, source_patterns=[name], target_patterns=[name]
        ).values()
    return weights


def _look_up(header: GgufHeader, model: PreTrainedModel) -> Names:
    """Find names by gguf's table for the architecture, and what Transformers adds to it."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    numbers = {name: number for number, name in MODEL_ARCH_NAMES.items()}
    num_layers = model.config.get_text_config().num_hidden_layers
    table = get_tensor_name_map(numbers[header.architecture], num_layers)
    processor = TENSOR_PROCESSORS[header.architecture](config=model.config.to_dict())
    names = Names()
    for name in model.state_dict():
        stem, dot, last = name.rpartition(".")
        stem, suffix = (stem, dot + last) if last in ("weight", "bias") else (name, "")
        keys: dict[str, str] = {}
        if (key := table.get_name(stem)) is not None:
            keys[key + suffix] = name
        else:
            processor.perform_fallback_tensor_mapping(keys, suffix, "", name)
        if present := [key for key in keys if key in header.tensors]:
            names[name] = present[0], None
    return names


def plan_layers(
    header: GgufHeader,
    layers: Sequence[MoeLayer],
    banks: Mapping[str, dict[str, FusedParameter]],
    files: FileReader,
) -> list[LayerSources]:
    """Return where the experts of each layer are, and log how they are held.

    Args:
        banks: the experts' parameters by experts module and name.
    """
    planned = [
        plan_layer(header, _block_number(layer.name), banks[layer.name], files) for layer in layers
    ]
    for line in describe_layers(planned):
        log.info("%s: %s", header.file, line)
    return planned


def _block_number(name: str) -> int:
    """Return the number of the layer that an experts module is in."""
    return next(int(part) for part in name.split(".") if part.isdigit())


def load_gguf_tokenizer(file: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer that a file's metadata describe."""
    return AutoTokenizer.from_pretrained(
        file.parent, gguf_file=file.name, local_files_only=True, trust_remote_code=False
    )
