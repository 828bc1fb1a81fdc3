"""Sizes, budgets and bounds on speed of a model that is known by its configuration alone.

The bound is a roofline (Williams, Waterman and Patterson, 2009): a token takes at least as long as
its experts that are not in memory take to read, and as long as its weights take to come from
memory. Experts count as equally likely, so that hits are the share of experts in memory; real
routing is more local and hits more.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from runtime.engine.auto_budget import FreeMemory, choose_budget
from runtime.errors import BudgetError
from runtime.hf.loading import StrippedModel
from runtime.hf.strip import list_taken_parameters
from runtime.policy.budget import Budget, SlotRequirements, count_slots
from runtime.store.layout import SlotLayout
from runtime.store.packed.layout import PackedLayout


@dataclass(frozen=True, kw_only=True)
class MachineLimits:
    """This machine: what bounds a model on it."""

    free_memory_bytes: int
    disk_bytes_per_second: float | None
    """None: not measured."""
    memory_bytes_per_second: float


@dataclass(frozen=True, kw_only=True)
class ModelCounts:
    """Parameters of a model, and memory that does not depend on the experts' format."""

    parameters: int
    expert_parameters: int
    """Parameters of all experts."""
    active_parameters: int
    """Those that one token is multiplied by; of the input embedding it takes one row."""
    dense_bytes: int
    """Weights that are not experts."""
    read_dense_bytes: int
    """The part of them that each token reads from memory."""
    kv_bytes_per_token: int
    num_layers: int
    """Layers with routed experts."""
    num_experts: int
    top_k: int

    @property
    def experts_per_token(self) -> int:
        return self.num_layers * self.top_k


@dataclass(frozen=True, kw_only=True)
class FormatPlan:
    """A model on this machine, with its experts in one format; bytes, seconds, shares of 1."""

    format: str
    expert_bytes: int
    experts_bytes: int
    total_bytes: int
    """All experts and the other weights."""
    least_budget_bytes: int
    """Memory for the experts of one token in one layer."""
    budget_bytes: int | None
    """The choice of `budget=auto`; None: there is no room, and the figures below are those of
    the least budget."""
    error: str | None
    """The reason why there is no room."""
    hit_rate: float
    """Share of the experts that the budget holds."""
    reads_per_token: float
    """Experts that a token reads from the disk."""
    read_bytes_per_token: float
    disk_seconds: float | None
    memory_seconds: float
    tpot_seconds: float | None
    """The bound: the longer of both."""


def count_parameters(
    stripped: StrippedModel, *, top_k: int, kv_bytes_per_token: int
) -> ModelCounts:
    """Count a model's parameters; those on the meta device have no memory to look at.

    The few that some models keep in float32 count in the model's dtype.
    """
    model: Any = stripped.model
    experts = list_taken_parameters(stripped.layers)
    expert_parameters = sum(math.prod(parameter.shape) for parameter in experts)
    dense = [*model.parameters(), *model.buffers()]
    dense_bytes = sum(tensor.nbytes for tensor in dense)
    dense_parameters = sum(parameter.numel() for parameter in model.parameters())
    unread = find_unread_embedding(model)
    unread_numel = 0 if unread is None else unread.numel()
    active = sum(top_k * math.prod(parameter.shape[1:]) for parameter in experts)
    return ModelCounts(
        parameters=expert_parameters + dense_parameters,
        expert_parameters=expert_parameters,
        active_parameters=dense_parameters - unread_numel + active,
        dense_bytes=dense_bytes,
        read_dense_bytes=dense_bytes - (0 if unread is None else unread.nbytes),
        kv_bytes_per_token=kv_bytes_per_token,
        num_layers=len(stripped.layers),
        num_experts=max(parameter.num_experts for parameter in experts),
        top_k=top_k,
    )


def find_unread_embedding(model: Any) -> nn.Parameter | None:
    """Return the input embedding's table; None if the output is computed with it too."""
    table = model.get_input_embeddings().weight
    output = model.get_output_embeddings()
    return None if output is not None and output.weight is table else table


def plan_formats(
    counts: ModelCounts,
    layouts: Mapping[str, Sequence[SlotLayout | PackedLayout]],
    limits: MachineLimits,
    *,
    kv_tokens: int,
) -> list[FormatPlan]:
    """Plan each format, given the layouts of its layers.

    Args:
        kv_tokens: tokens for whose KV cache memory is left.
    """
    free = FreeMemory(
        available=[limits.free_memory_bytes],
        weights=counts.dense_bytes,
        kv_caches=kv_tokens * counts.kv_bytes_per_token,
    )
    return [plan_format(name, counts, own, limits, free) for name, own in layouts.items()]


def plan_format(
    name: str,
    counts: ModelCounts,
    layouts: Sequence[SlotLayout | PackedLayout],
    limits: MachineLimits,
    free: FreeMemory,
) -> FormatPlan:
    """Plan one format."""
    # Slots have the size of the largest expert, as in the arena.
    expert_bytes = max(layout.num_bytes for layout in layouts)
    needs = SlotRequirements(
        slot_bytes=expert_bytes,
        top_k=counts.top_k,
        num_experts=counts.num_layers * counts.num_experts,
    )
    budget, error = None, None
    try:
        budget = choose_budget(needs, free).num_bytes
    except BudgetError as no_room:
        error = str(no_room)
    slots = count_slots(Budget(budget or needs.least_bytes), needs)
    hit_rate = slots / needs.num_experts
    reads = (1 - hit_rate) * counts.experts_per_token
    touched = counts.read_dense_bytes + counts.experts_per_token * expert_bytes
    memory_seconds = touched / limits.memory_bytes_per_second
    speed = limits.disk_bytes_per_second
    disk_seconds = None if speed is None else reads * expert_bytes / speed
    return FormatPlan(
        format=name,
        expert_bytes=expert_bytes,
        experts_bytes=needs.total_bytes,
        total_bytes=needs.total_bytes + counts.dense_bytes,
        least_budget_bytes=needs.least_bytes,
        budget_bytes=budget,
        error=error,
        hit_rate=hit_rate,
        reads_per_token=reads,
        read_bytes_per_token=reads * expert_bytes,
        disk_seconds=disk_seconds,
        memory_seconds=memory_seconds,
        tpot_seconds=None if disk_seconds is None else max(disk_seconds, memory_seconds),
    )
