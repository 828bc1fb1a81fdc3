"""Find the field of a model's configuration that sets the width of its routed experts."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from runtime.errors import CheckpointError
from runtime.hf.layers import find_expert_banks

PROBE_NEURONS = 16
"""Neurons added to find the shapes that depend on a field."""

WIDTH_WORDS = ("intermediate", "ffn", "width", "inner")
"""Parts of the names of such fields; `hidden_size` is never one."""


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
