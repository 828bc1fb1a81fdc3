"""Plan of an inflated checkpoint: each tensor copied, or with zero neurons appended.

The field of the configuration that sets the width of routed experts is found by growing each
candidate on the meta device.
"""

import copy
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping

from runtime.errors import CheckpointError
from runtime.hf.layers import find_expert_banks
from runtime.hf.loading import find_model_class, read_config
from runtime.hf.strip import strip_experts
from runtime.store.model_source import list_weight_files
from runtime.store.tensor_index import StoredTensor, read_tensor_index
from runtime.store.weight_plan import WeightPlan, plan_weights

PROBE_NEURONS = 16
"""Neurons added to find the shapes that depend on a field."""

WIDTH_WORDS = ("intermediate", "ffn", "width", "inner")
"""Parts of the names of such fields; `hidden_size` is never one."""

WIDTH_STEP = 64
"""Neurons: widths of real models are multiples of it, and kernels for integers need them to be."""


@dataclass(frozen=True)
class ParameterGrowth:
    """Growth of one fused parameter `(experts, ...)` with the experts' width."""

    axis: int
    """The dimension that grows, including the expert dimension."""
    rows_per_neuron: int
    """2 if gate and up are fused, else 1."""
    elements_per_neuron: int
    """Elements of one expert for each of its neurons."""


@dataclass(frozen=True)
class ExpertWidth:
    """The field and the parameters that depend on it."""

    field: str
    neurons: int
    growths: dict[str, ParameterGrowth]
    """By the dotted name of the fused parameter; only parameters that grow."""

    @property
    def elements_per_neuron(self) -> int:
        """Elements of one expert for each of its neurons.

        Raises:
            CheckpointError: the layers differ.
        """
        sums: dict[str, int] = {}
        for name, infer_growth in self.growths.items():
            bank = name.rpartition(".")[0]
            sums[bank] = sums.get(bank, 0) + infer_growth.elements_per_neuron
        if len(set(sums.values())) != 1:
            raise CheckpointError(f"{self.field}: the layers' experts grow by different sizes")
        return next(iter(sums.values()))


@dataclass(frozen=True)
class TensorTarget:
    """One tensor of the inflated checkpoint."""

    source: StoredTensor
    shape: tuple[int, ...]
    dtype: torch.dtype
    axis: int | None = None
    """Dimension of the source that grows; None: the tensor is copied."""
    blocks: int = 1
    """Parts along the axis that each grow at their end: 2 for concatenated gate and up."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def grown(self, tensor: Tensor, axis: int) -> Tensor:
        """Append the zeros to `tensor`, the source or one expert of it."""
        assert self.axis is not None
        blocks = tensor.to(self.dtype).chunk(self.blocks, dim=axis)
        extra = (self.shape[self.axis] - self.source.shape[self.axis]) // self.blocks
        shape = list(blocks[0].shape)
        shape[axis] = extra
        zeros = torch.zeros(shape, dtype=self.dtype)
        return torch.cat([part for block in blocks for part in (block, zeros)], dim=axis)


@dataclass(frozen=True)
class InflationPlan:
    """An inflated checkpoint: its configuration and tensors."""

    folder: Path
    config: dict[str, Any]
    """The new `config.json`."""
    targets: dict[str, TensorTarget]
    """By name, in the order of the source's files."""
    width: ExpertWidth
    neurons: int
    """Neurons of each expert after inflation."""
    num_experts: int
    """Experts of all layers."""
    expert_bytes: int
    expert_bytes_before: int

    @property
    def num_bytes(self) -> int:
        return sum(target.num_bytes for target in self.targets.values())


def make_plan(
    folder: Path,
    *,
    dtype: str = "auto",
    expert_bytes: int | None = None,
    total_bytes: int | None = None,
) -> InflationPlan:
    """Plan the smallest width at which each expert has `expert_bytes`, or all have `total_bytes`.

    Args:
        dtype: dtype of the stored experts (`float32`...); `auto` keeps theirs. Other tensors keep
            theirs.

    Raises:
        CheckpointError: the experts are not stored as plain weights, or are already larger.
    """
    cls, config = find_model_class(read_config(folder))
    model = make_meta_model(cls, config)
    parameters = strip_experts(model)
    if not parameters:
        raise CheckpointError(
            f"{cls.__name__} has no routed experts that Transformers' experts interface reaches"
        )
    extents = read_tensor_index(list_weight_files(folder))
    banks = plan_weights(model, parameters, extents, get_model_conversion_mapping(model))
    recipes = {r.parameter.target: r for bank in banks.values() for r in bank.values()}
    for recipe in recipes.values():
        check_plain_weights(recipe)
    width = find_width(cls, config)
    stored = None if dtype == "auto" else getattr(torch, dtype)
    first_bank = next(iter(banks.values()))
    itemsize = (stored or next(iter(first_bank.values())).extents(0)[0].dtype).itemsize
    num_experts = sum(
        max(recipe.parameter.num_experts for recipe in bank.values()) for bank in banks.values()
    )
    if expert_bytes is None:
        assert total_bytes is not None
        expert_bytes = -(-total_bytes // num_experts)
    before = itemsize * sum(math.prod(r.parameter.shape[1:]) for r in first_bank.values())
    if expert_bytes < before:
        raise CheckpointError(
            f"each expert of {folder} already takes {before} bytes, all take "
            f"{num_experts * before}; request more than {expert_bytes} "
            "(expert_size=... or total_size=...)"
        )
    per_neuron = width.elements_per_neuron * itemsize
    neurons = width.neurons + -(-(expert_bytes - before) // per_neuron)
    neurons = -(-neurons // WIDTH_STEP) * WIDTH_STEP
    targets = plan_expert_tensors(recipes, model, width, neurons - width.neurons, stored)
    raw = replace_field(json.loads((folder / "config.json").read_text()), width.field, neurons)
    if stored is not None:
        raw["dtype"] = dtype
    return InflationPlan(
        folder=folder,
        config=raw,
        targets={
            key: targets.get(key, TensorTarget(extent, extent.shape, extent.dtype))
            for key, extent in sorted(
                extents.items(), key=lambda item: (item[1].file, item[1].offset)
            )
        },
        width=width,
        neurons=neurons,
        num_experts=num_experts,
        expert_bytes=before + (neurons - width.neurons) * per_neuron,
        expert_bytes_before=before,
    )


def check_plain_weights(recipe: WeightPlan) -> None:
    """Refuse experts that are not stored as plain weights.

    Raises:
        CheckpointError: names the conversion that they need.
    """
    dtypes = {extent.dtype for extents in recipe.sources.values() for extent in extents}
    if not recipe.is_plain or not all(dtype.is_floating_point for dtype in dtypes):
        operations = [type(op).__name__ for op in getattr(recipe.converter, "operations", [])]
        raise CheckpointError(
            f"{recipe.parameter.target}: cannot append neurons to experts stored as "
            f"{', '.join(sorted(map(str, dtypes)))} through "
            f"{', '.join(operations) or 'no operation'}; inflate a checkpoint that stores "
            "plain expert weights"
        )


def plan_expert_tensors(
    recipes: Mapping[str, WeightPlan],
    model: torch.nn.Module,
    width: ExpertWidth,
    extra: int,
    dtype: torch.dtype | None,
) -> dict[str, TensorTarget]:
    targets: dict[str, TensorTarget] = {}
    for name, recipe in recipes.items():
        growth = width.growths.get(name)
        experts = model.get_submodule(recipe.parameter.bank)
        for extents in recipe.sources.values():
            for extent in extents:
                stored = dtype or extent.dtype
                if growth is None:
                    targets[extent.key] = TensorTarget(extent, extent.shape, stored)
                    continue
                axis = growth.axis - 1 if recipe.is_per_expert else growth.axis
                rows = growth.rows_per_neuron // len(recipe.sources)
                shape = list(extent.shape)
                shape[axis] += extra * rows
                # Gate and up in one tensor: two blocks, unless their rows are interleaved.
                is_fused = rows == 2 and bool(getattr(experts, "is_concatenated", True))
                targets[extent.key] = TensorTarget(
                    extent, tuple(shape), stored, axis, blocks=2 if is_fused else 1
                )
    return targets


def find_width(cls: type[PreTrainedModel], config: PreTrainedConfig) -> ExpertWidth:
    """Grow each candidate field on the meta device and return the one that changes only experts.

    Raises:
        CheckpointError: there is no such field; names the other parameters that would grow.
    """
    model = make_meta_model(cls, config)
    before = read_shapes(model)
    experts = {
        f"{bank}.{name}"
        for bank, module in find_expert_banks(model).items()
        for name, value in module.named_parameters(recurse=False)
        if value.shape[:1] == (getattr(module, "num_experts", None),)
    }
    text = config.get_text_config()
    values = {name: value for name, value in text.to_dict().items() if isinstance(value, int)}
    refused = []
    for name in sorted(values, key=lambda name: ("moe" not in name and "expert" not in name, name)):
        if isinstance(values[name], bool) or not any(word in name for word in WIDTH_WORDS):
            continue
        grown = copy.deepcopy(config)
        setattr(grown.get_text_config(), name, values[name] + PROBE_NEURONS)
        try:
            after = read_shapes(make_meta_model(cls, grown))
        except (RuntimeError, ValueError, TypeError, ZeroDivisionError):
            # A model that cannot be built with 16 more: the field is a count of heads or experts.
            continue
        changed = {key for key in before if after.get(key) != before[key]}
        if after.keys() != before.keys() or not changed & experts:
            continue
        if changed <= experts:
            growths = {key: infer_growth(before[key], after[key], key) for key in sorted(changed)}
            return ExpertWidth(name, values[name], growths)
        refused.append(f"{name} also sets {', '.join(sorted(changed - experts)[:3])}")
    raise CheckpointError(
        f"{cls.__name__}: no field of its configuration sets the width of the routed experts alone"
        + (f" ({'; '.join(refused)})" if refused else "")
        + "; inflate another model, for example model=qwen2-moe-tiny"
    )


def make_meta_model(cls: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        return cls(copy.deepcopy(config))


def read_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Read the shape of every parameter by dotted name."""
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def infer_growth(before: tuple[int, ...], after: tuple[int, ...], key: str) -> ParameterGrowth:
    """Infer the growth of a parameter from its shapes before and after adding `PROBE_NEURONS`.

    Raises:
        CheckpointError: it grew in more than one dimension, or not in proportion.
    """
    axes = [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
    extra = after[axes[0]] - before[axes[0]]
    if len(axes) != 1 or axes[0] == 0 or extra not in (PROBE_NEURONS, 2 * PROBE_NEURONS):
        raise CheckpointError(f"{key}: {before} becomes {after} with {PROBE_NEURONS} more neurons")
    elements = 1
    for i, size in enumerate(after):
        elements *= 1 if i == 0 else extra // PROBE_NEURONS if i == axes[0] else size
    return ParameterGrowth(axes[0], extra // PROBE_NEURONS, elements)


def replace_field(raw: Mapping, field: str, neurons: int) -> dict:
    """Copy the tree of a `config.json` with the field replaced, in the text part if it is there."""
    tree = copy.deepcopy(dict(raw))
    parts = [tree[key] for key in ("text_config", "decoder") if isinstance(tree.get(key), dict)]
    part = next((part for part in parts if field in part), tree)
    part[field] = neurons
    return tree
