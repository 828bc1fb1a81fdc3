"""Which number in a model's configuration sets how wide its routed experts are."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from runtime.errors import CheckpointError
from runtime.hf.layers import expert_banks

PROBE = 16
"""Neurons that are added to see which shapes follow."""

WIDTH_WORDS = ("intermediate", "ffn", "width", "inner")
"""What the names of such fields are made of; `hidden_size` is never one."""


@dataclass(frozen=True)
class Growth:
    """How one fused parameter `(experts, ...)` grows with the experts' width."""

    axis: int
    """The dimension that grows, counted with the experts' own."""
    rows_per_neuron: int
    """2 where gate and up are fused, 1 elsewhere."""
    elements_per_neuron: int
    """Of one expert."""


@dataclass(frozen=True)
class Width:
    """The field and what follows from it."""

    field: str
    neurons: int
    growths: dict[str, Growth]
    """Fused parameter's dotted name -> how it grows; those that do not grow are not in it."""

    @property
    def elements_per_neuron(self) -> int:
        """Of one expert.

        Raises:
            CheckpointError: the layers differ.
        """
        sums: dict[str, int] = {}
        for name, growth in self.growths.items():
            bank = name.rpartition(".")[0]
            sums[bank] = sums.get(bank, 0) + growth.elements_per_neuron
        if len(set(sums.values())) != 1:
            raise CheckpointError(f"{self.field}: the layers' experts grow by different sizes")
        return next(iter(sums.values()))


def find_width(cls: type[PreTrainedModel], config: PreTrainedConfig) -> Width:
    """Grows each candidate field on the meta device, and takes the one that only experts follow.

    Raises:
        CheckpointError: no such field; with the parameters that would have grown as well.
    """
    model = skeleton(cls, config)
    before = shapes(model)
    experts = expert_parameters(model)
    text = config.get_text_config()
    values = {name: value for name, value in text.to_dict().items() if isinstance(value, int)}
    refused = []
    for name in sorted(values, key=lambda name: ("moe" not in name and "expert" not in name, name)):
        if isinstance(values[name], bool) or not any(word in name for word in WIDTH_WORDS):
            continue
        grown = with_width(config, name, values[name] + PROBE)
        try:
            after = shapes(skeleton(cls, grown))
        except (RuntimeError, ValueError, TypeError, ZeroDivisionError):
            # Not a width, if the model cannot be built with 16 more: a count of heads or experts.
            continue
        changed = {key for key in before if after.get(key) != before[key]}
        if after.keys() != before.keys() or not changed & experts:
            continue
        if changed <= experts:
            growths = {key: growth(before[key], after[key], key) for key in sorted(changed)}
            return Width(name, values[name], growths)
        refused.append(f"{name} also sets {', '.join(sorted(changed - experts)[:3])}")
    raise CheckpointError(
        f"{cls.__name__}: no field of its configuration sets the width of the routed experts alone"
        + (f" ({'; '.join(refused)})" if refused else "")
        + "; inflate another model, for example model=qwen2-moe-tiny"
    )


def skeleton(cls: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """The model without memory."""
    with torch.device("meta"):
        return cls(copy.deepcopy(config))


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Of every parameter, by dotted name."""
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def expert_parameters(model: nn.Module) -> set[str]:
    """Dotted names of the parameters `(experts, ...)` of every experts module."""
    return {
        f"{bank}.{name}"
        for bank, module in expert_banks(model).items()
        for name, value in module.named_parameters(recurse=False)
        if value.shape[:1] == (getattr(module, "num_experts", None),)
    }


def with_width(config: PreTrainedConfig, field: str, neurons: int) -> PreTrainedConfig:
    """A copy with another value in that field of its text part."""
    changed = copy.deepcopy(config)
    setattr(changed.get_text_config(), field, neurons)
    return changed


def growth(before: tuple[int, ...], after: tuple[int, ...], key: str) -> Growth:
    """How a parameter's shape followed `PROBE` neurons.

    Raises:
        CheckpointError: in more than one dimension, or not in proportion.
    """
    axes = [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
    extra = after[axes[0]] - before[axes[0]]
    if len(axes) != 1 or axes[0] == 0 or extra not in (PROBE, 2 * PROBE):
        raise CheckpointError(f"{key}: {before} becomes {after} with {PROBE} neurons more")
    elements = 1
    for i, size in enumerate(after):
        elements *= 1 if i == 0 else extra // PROBE if i == axes[0] else size
    return Growth(axes[0], extra // PROBE, elements)


def set_in(raw: Mapping, field: str, neurons: int) -> dict:
    """`config.json`'s tree with the field set where it stands, in the text part if there is one."""
    tree = copy.deepcopy(dict(raw))
    places = [tree[key] for key in ("text_config", "decoder") if isinstance(tree.get(key), dict)]
    place = next((one for one in places if field in one), tree)
    place[field] = neurons
    return tree
