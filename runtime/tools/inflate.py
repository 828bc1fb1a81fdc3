"""Copies of a checkpoint whose experts have more neurons, all of them zero: outputs are equal."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runtime.errors import CheckpointError
from runtime.store.model_check import CONFIG, list_weight_files, read_config_file
from runtime.store.model_source import INFLATED
from runtime.store.rewritten import RewrittenTensor, rewrite_checkpoint
from runtime.store.tensor_index import read_tensor_index
from runtime.store.weight_plan import is_a_weight

MODEL_TYPES = ("qwen2_moe", "qwen3_moe")
"""Models whose checkpoints have a tensor for each of an expert's projections, and whose `FIELD`
sets the width of routed experts alone."""
FIELD = "moe_intermediate_size"
PROJECTION = re.compile(r"\.experts\.\d+\.(gate|up|down)_proj\.weight$")
WIDTH_STEP = 64
"""Neurons: widths of real models are multiples of it, and kernels for integers need them to be."""


def widen(projection: Tensor, *, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Return a projection of an expert with zero neurons appended."""
    widened = torch.zeros(shape, dtype=dtype)
    widened[: projection.shape[0], : projection.shape[1]] = projection
    return widened


@dataclass(frozen=True, kw_only=True)
class InflationPlan:
    """An inflated checkpoint: its configuration and tensors."""

    folder: Path
    config: dict[str, Any]
    """The new `config.json`."""
    tensors: Mapping[str, RewrittenTensor]
    """By name, in the order of the source's files."""
    neurons_before: int
    neurons: int
    """Neurons of each expert after inflation."""
    num_experts: int
    """Experts of all layers."""
    expert_bytes_before: int
    expert_bytes: int

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors.values())


def plan_inflation(
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
        CheckpointError: the model is of another type, or quantised, or its experts are already
            larger.
    """
    config = read_config_file(folder)
    stored = read_tensor_index(list_weight_files(folder))
    experts = {key: tensor for key, tensor in stored.items() if PROJECTION.search(key)}
    if (
        config.get("model_type") not in MODEL_TYPES
        or not experts
        or not all(is_a_weight(tensor.dtype) for tensor in experts.values())
    ):
        raise CheckpointError(
            f"{folder}: inflate writes copies of {' and '.join(MODEL_TYPES)} models that are not "
            "quantised; inflate another one, such as model=qwen2-moe-tiny"
        )
    widest = max((tensor.dtype for tensor in experts.values()), key=lambda own: own.itemsize)
    own = widest if dtype == "auto" else getattr(torch, dtype)
    per_neuron = 3 * config["hidden_size"] * own.itemsize
    num_experts, before = len(experts) // 3, config[FIELD]
    if expert_bytes is None:
        assert total_bytes is not None
        expert_bytes = -(-total_bytes // num_experts)
    if expert_bytes < before * per_neuron:
        raise CheckpointError(
            f"each expert of {folder} already takes {before * per_neuron} bytes, all take "
            f"{num_experts * before * per_neuron}; request more than {expert_bytes} "
            "(expert_size=... or total_size=...)"
        )
    neurons = -(-expert_bytes // (per_neuron * WIDTH_STEP)) * WIDTH_STEP
    tensors: dict[str, RewrittenTensor] = {}
    for key, tensor in sorted(stored.items(), key=lambda item: (item[1].file, item[1].offset)):
        if key not in experts:
            tensors[key] = RewrittenTensor(tensor, tensor.shape, tensor.dtype)
            continue
        width = config["hidden_size"]
        is_down = key.endswith("down_proj.weight")
        shape = (width, neurons) if is_down else (neurons, width)
        change = partial(widen, shape=shape, dtype=own)
        tensors[key] = RewrittenTensor(tensor, shape, own, change)
    new_config = {**config, FIELD: neurons}
    if dtype != "auto":
        new_config.pop("torch_dtype", None)  # the field's earlier name
        new_config["dtype"] = dtype
    return InflationPlan(
        folder=folder,
        config=new_config,
        tensors=tensors,
        neurons_before=before,
        neurons=neurons,
        num_experts=num_experts,
        expert_bytes_before=before * per_neuron,
        expert_bytes=neurons * per_neuron,
    )


def write_inflated(
    plan: InflationPlan,
    output: Path,
    *,
    origin: dict[str, str],
    advance: Callable[[int], None] = lambda _: None,
) -> None:
    """Write the checkpoint; raises as `rewrite_checkpoint`.

    Args:
        origin: `identity` of the source model, whose predictors stay valid.
    """
    record = {
        "origin": origin,
        "field": FIELD,
        "neurons": [plan.neurons_before, plan.neurons],
        "expert_bytes": [plan.expert_bytes_before, plan.expert_bytes],
    }
    rewrite_checkpoint(
        plan.folder,
        output,
        plan.tensors,
        lambda _: {CONFIG: plan.config, INFLATED: record},
        option="output",
        advance=advance,
    )
