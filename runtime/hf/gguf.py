"""Loads models from GGUF files, without their experts.

Names are those of gguf's own tables, and a few more. Transformers' loader is not used: it has five
architectures with experts, dequantises whole tensors, experts among them, and keeps a view of each
word of the vocabulary, which takes seconds and hundreds of megabytes.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from runtime.errors import CheckpointError
from runtime.hf.experts import find_accumulation
from runtime.hf.gguf_config import find_architecture
from runtime.hf.layers import MoeLayer
from runtime.hf.model_faults import refuse_missing
from runtime.hf.strip import TAKEN, list_taken_parameters
from runtime.store.files import FileReader
from runtime.store.ggml.library import PLAIN, multiplies
from runtime.store.gguf import rows
from runtime.store.gguf.architectures import read_translation
from runtime.store.gguf.header import EXPERTS, GgufHeader
from runtime.store.gguf.rows import GgufRows, plan_experts
from runtime.store.weight_plan import WeightPlan


def choose_dtype(header: GgufHeader) -> torch.dtype:
    """Return the dtype of the file's weights; bfloat16, which kernels compute with, of blocks."""
    kinds = {tensor.kind for tensor in header.tensors.values()}
    if kinds <= set(PLAIN):
        return next(PLAIN[kind] for kind in ("BF16", "F16", "F32") if kind in kinds)
    return torch.bfloat16


Convert = Callable[..., Tensor]
"""Makes a parameter of the stored tensors that it comes from, in float32."""


@dataclass(frozen=True)
class StreamedTensor:
    """A parameter that is read from the file when Transformers fills it."""

    tensors: Sequence[GgufRows]
    files: FileReader
    shape: torch.Size
    dtype: torch.dtype
    convert: Convert | None
    """Undoes what llama.cpp's converter did; None: the tensor is the parameter."""

    def __getitem__(self, _: object) -> Tensor:
        if self.convert is not None:
            stored = [one.load(self.files) for one in self.tensors]
            weights = self.convert(*stored).to(self.dtype)
        else:
            weights = self.tensors[0].load(self.files, self.dtype)
        # Of one row, some versions of the converter leave out the dimension.
        return weights.reshape(self.shape)

    def read_stored(self) -> tuple[str, Tensor] | None:
        """Return type and rows, uint8, as the file has them; None: they are not multiplied so."""
        tensor = self.tensors[0]
        kind = tensor.ggml_type
        if self.convert is not None or kind in PLAIN or not multiplies(kind):
            return None
        raw = torch.empty(tensor.num_bytes, dtype=torch.uint8)
        tensor.read(self.files, raw)
        return kind, raw


@contextmanager
def open_dense(header: GgufHeader, model: PreTrainedModel) -> Iterator[dict[str, StreamedTensor]]:
    """Open all tensors but the experts', by the model's names of them.

    Raises:
        CheckpointError: a tensor has another size than the parameter, or is none of the model's.
    """
    parameters, names = model.state_dict(), find_names(header, model)
    check_names(header, model, names)
    undo = find_architecture(header).undo
    with FileReader() as files:
        streamed = {}
        for name, keys in names.items():
            tensors = [GgufRows.of(header.tensors[key]) for key in keys]
            shape = parameters[name].shape
            ending = next((end for end in undo if name.endswith(end)), None)
            convert = getattr(rows, undo[ending]) if ending and undo[ending] else None
            if convert is not None:
                convert = partial(convert, model.config.get_text_config())
            if not _makes(convert, tensors, shape):
                shapes = ", ".join(str(tensor.shape) for tensor in tensors)
                raise CheckpointError(
                    f"{header.file}: {', '.join(keys)} is {shapes}; by the metadata, {name} is "
                    f"{tuple(shape)}"
                )
            streamed[name] = StreamedTensor(tensors, files, shape, model.dtype, convert)
        yield streamed


def _makes(convert: Convert | None, tensors: Sequence[GgufRows], shape: torch.Size) -> bool:
    """Return whether tensors make a parameter of the shape, or one without dimensions of 1."""
    stored = [torch.empty(tensor.shape, device="meta") for tensor in tensors]
    try:
        made = stored[0] if convert is None else convert(*stored)
    except (RuntimeError, IndexError):
        return False
    return [size for size in made.shape if size > 1] == [size for size in shape if size > 1]


def find_names(header: GgufHeader, model: PreTrainedModel) -> dict[str, tuple[str, ...]]:
    """Return the file's names of the tensors of each parameter, by gguf's table and ours."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    numbers = {name: number for number, name in MODEL_ARCH_NAMES.items()}
    num_layers = model.config.get_text_config().num_hidden_layers
    table = get_tensor_name_map(numbers[header.architecture], num_layers)
    names, own = {}, read_translation().tensors
    for name in model.state_dict():
        stem, dot, last = name.rpartition(".")
        stem, suffix = (stem, dot + last) if last in ("weight", "bias") else (name, "")
        keys: tuple[str, ...] = (f"{table.get_name(stem)}{suffix}",)
        ending = next((end for end in own if name.endswith(end)), None)
        if keys[0] not in header.tensors and ending is not None:
            keys = tuple(f"blk.{_block_number(name)}.{key}" for key in own[ending])
        if set(keys) <= set(header.tensors):
            names[name] = keys
    return names


def check_names(
    header: GgufHeader, model: PreTrainedModel, names: Mapping[str, tuple[str, ...]]
) -> None:
    """Raise CheckpointError for a tensor that is missing, or is none of the model's."""
    tied = getattr(model, "all_tied_weights_keys", {})
    refuse_missing(header.file, set(model.state_dict()) - set(names) - set(tied))
    used = {key for keys in names.values() for key in keys}
    num_layers = model.config.get_text_config().num_hidden_layers
    has_bias = any(getattr(module, "has_bias", False) for module in model.modules())
    for key in header.tensors:
        block = re.match(r"blk\.(\d+)\.", key)
        # Layers after the last one predict further tokens.
        if key in used or (block and int(block[1]) >= num_layers) or key == ROPE_FACTORS:
            continue
        expert = EXPERTS.search(key)
        if expert is None or (expert[2] == "bias" and not has_bias):
            raise CheckpointError(
                f"{header.file} has the tensor {key}, which changes the result and is not "
                f"understood here of {find_architecture(header).models}; give the "
                "original checkpoint (config.json and safetensors files)"
            )


ROPE_FACTORS = "rope_freqs.weight"
"""Divides the frequencies of rotary embeddings, as the scaling of Llama 3 does."""


def apply_rope_factors(header: GgufHeader, model: PreTrainedModel) -> None:
    """Divide the frequencies of a model's rotary embeddings by the file's factors.

    Raises:
        CheckpointError: there are more or fewer than the model has frequencies.
    """
    if (tensor := header.tensors.get(ROPE_FACTORS)) is None:
        return
    with FileReader() as files:
        factors = GgufRows.of(tensor).load(files)
    for module in model.modules():
        for name in ("inv_freq", "original_inv_freq"):
            frequencies = module._buffers.get(name)
            if frequencies is None:
                continue
            if frequencies.shape != factors.shape:
                raise CheckpointError(
                    f"{header.file}: {ROPE_FACTORS} is {tensor.shape}; the model has "
                    f"{len(frequencies)} frequencies"
                )
            frequencies.div_(factors.to(frequencies.device))


def lay_out_rows(layers: Sequence[MoeLayer]) -> None:
    """Let all experts compute with rows and with gates before ups, as files have them."""
    for layer in layers:
        module: Any = layer.experts
        if not getattr(module, "is_transposed", layer.adapter.name == "dense"):
            continue
        if hasattr(module, "has_gate"):
            find_accumulation(module)  # found out by the class's own loop, as it is
        module.is_transposed = False
        if not getattr(module, "is_concatenated", True):
            module.is_concatenated = True
            module._apply_gate = partial(_apply_gate_to_halves, module)
        vars(module)[TAKEN] = [
            replace(one, shape=(one.shape[0], *one.shape[:0:-1]))
            for one in list_taken_parameters([layer])
        ]


def _apply_gate_to_halves(module: Any, gate_up: Tensor) -> Tensor:
    """Compute a class's own gate, whose columns of gates and ups take turns."""
    interleaved = torch.stack(gate_up.chunk(2, dim=-1), -1).flatten(-2)
    output: Tensor = type(module)._apply_gate(module, interleaved)
    return output


def plan_layers(header: GgufHeader, layers: Sequence[MoeLayer]) -> list[dict[str, WeightPlan]]:
    """Return how the experts of each layer are read, by parameter."""
    return [
        {
            parameter.name: plan_experts(header, _block_number(layer.name), parameter)
            for parameter in list_taken_parameters([layer])
        }
        for layer in layers
    ]


def _block_number(name: str) -> int:
    """Return the number of the layer that an experts module is in."""
    return next(int(part) for part in name.split(".") if part.isdigit())
