"""What is written for each tensor of the checkpoint: as it is, or with zero neurons appended."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.conversion_mapping import get_model_conversion_mapping

from runtime.errors import CheckpointError
from runtime.hf.classes import model_class
from runtime.hf.strip import strip_experts
from runtime.store.extents import StoredTensor, read_tensor_index
from runtime.store.index import plan_weights
from runtime.store.model_source import is_weights
from runtime.store.recipe import WeightPlan
from runtime.tools.inflate.width import Growth, Width, find_width, set_in, skeleton

WIDTH_STEP = 16
"""Neurons. Rows of a multiple of 64 bytes keep every row as aligned as the first."""


@dataclass(frozen=True)
class Target:
    """One tensor of the inflated checkpoint."""

    source: StoredTensor
    shape: tuple[int, ...]
    dtype: torch.dtype
    axis: int | None = None
    """Dimension of the source that grows; None: the bytes are copied."""
    blocks: int = 1
    """Parts along the axis that grow each at their own end: 2 for gate and up one after another."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def grown(self, tensor: Tensor, axis: int) -> Tensor:
        """`tensor` (the source, or one expert of it) with its zeros."""
        assert self.axis is not None
        blocks = tensor.to(self.dtype).chunk(self.blocks, dim=axis)
        extra = (self.shape[self.axis] - self.source.shape[self.axis]) // self.blocks
        shape = list(blocks[0].shape)
        shape[axis] = extra
        zeros = torch.zeros(shape, dtype=self.dtype)
        return torch.cat([part for block in blocks for part in (block, zeros)], dim=axis)


@dataclass(frozen=True)
class Plan:
    """A checkpoint and what becomes of it."""

    folder: Path
    config: dict[str, Any]
    """The new `config.json`."""
    targets: dict[str, Target]
    """By name, in the order in which the source's files hold them."""
    width: Width
    neurons: int
    """Of each expert, afterwards."""
    num_experts: int
    """In all layers together."""
    expert_bytes: int
    expert_bytes_before: int

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(target.num_bytes for target in self.targets.values())


def make_plan(
    folder: Path,
    *,
    dtype: str = "auto",
    expert_bytes: int | None = None,
    total_bytes: int | None = None,
) -> Plan:
    """The smallest width at which each expert has `expert_bytes`, or all have `total_bytes`.

    Args:
        dtype: in which experts are stored (`float32`...); `auto`: their own. Other tensors stay.

    Raises:
        CheckpointError: experts whose bytes are more than weights of linear layers, or that are
            larger already.
    """
    cls, config = model_class(AutoConfig.from_pretrained(folder, local_files_only=True))
    model = skeleton(cls, config)
    parameters = strip_experts(model)
    if not parameters:
        raise CheckpointError(
            f"{cls.__name__} has no routed experts that Transformers' experts interface reaches"
        )
    extents = read_tensor_index(sorted(file for file in folder.iterdir() if is_weights(file.name)))
    banks = plan_weights(model, parameters, extents, get_model_conversion_mapping(model))
    recipes = {r.parameter.target: r for bank in banks.values() for r in bank.values()}
    for recipe in recipes.values():
        check(recipe)
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
            f"each expert of {folder} takes {before} bytes already, {num_experts * before} "
            f"together; ask for more than {expert_bytes} (expert_size=... or total_size=...)"
        )
    per_neuron = width.elements_per_neuron * itemsize
    neurons = width.neurons + -(-(expert_bytes - before) // per_neuron)
    neurons = -(-neurons // WIDTH_STEP) * WIDTH_STEP
    targets = expert_targets(recipes, model, width, neurons - width.neurons, stored)
    raw = set_in(json.loads((folder / "config.json").read_text()), width.field, neurons)
    if stored is not None:
        raw["dtype"] = dtype
    return Plan(
        folder=folder,
        config=raw,
        targets={
            key: targets.get(key, Target(extent, extent.shape, extent.dtype))
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


def check(recipe: WeightPlan) -> None:
    """Refuses experts whose stored bytes are not the weights themselves.

    Raises:
        CheckpointError: with what the library would do to them.
    """
    dtypes = {extent.dtype for extents in recipe.sources.values() for extent in extents}
    if not recipe.is_plain or not all(dtype.is_floating_point for dtype in dtypes):
        operations = [type(op).__name__ for op in getattr(recipe.converter, "operations", [])]
        raise CheckpointError(
            f"{recipe.parameter.target}: cannot append neurons to experts stored as "
            f"{', '.join(sorted(map(str, dtypes)))} through "
            f"{', '.join(operations) or 'no operation'}; inflate a checkpoint that stores its "
            "experts' weights as they are"
        )


def expert_targets(
    recipes: Mapping[str, WeightPlan],
    model: torch.nn.Module,
    width: Width,
    extra: int,
    dtype: torch.dtype | None,
) -> dict[str, Target]:
    """What is written for the experts' tensors, by key."""
    targets: dict[str, Target] = {}
    for name, recipe in recipes.items():
        growth = width.growths.get(name)
        experts = model.get_submodule(recipe.parameter.bank)
        for extents in recipe.sources.values():
            for extent in extents:
                stored = dtype or extent.dtype
                if growth is None:
                    targets[extent.key] = Target(extent, extent.shape, stored)
                    continue
                axis = growth.axis - 1 if recipe.is_per_expert else growth.axis
                rows = growth.rows_per_neuron // len(recipe.sources)
                shape = list(extent.shape)
                shape[axis] += extra * rows
                targets[extent.key] = Target(
                    extent, tuple(shape), stored, axis, blocks_of(growth, rows, experts)
                )
    return targets


def blocks_of(growth: Growth, rows: int, experts: torch.nn.Module) -> int:
    """Gate and up in one tensor: two blocks, or pairs of rows, whose zeros all come at the end."""
    concatenated = bool(getattr(experts, "is_concatenated", True))
    return 2 if rows == 2 and growth.rows_per_neuron == 2 and concatenated else 1
