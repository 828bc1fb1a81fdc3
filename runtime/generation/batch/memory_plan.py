"""Plan the group size and the memory of experts and KV caches for a batch run."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel

from predictors.correlation import CorrelationPredictor
from predictors.units import MIB
from runtime.config import StoreConfig, SystemConfig
from runtime.engine.loading import KVReserve, load_served
from runtime.engine.memory import available_memory_bytes
from runtime.generation.batch.config import BatchConfig, GroupConfig, Offload
from runtime.generation.batch.cost_profile import CostProfile, load_or_measure
from runtime.generation.batch.group_planner import (
    ExpertPopularity,
    GroupPlan,
    KVDemand,
    cumulative_bytes,
    plan_group,
    split_memory,
)
from runtime.generation.batch.prompts import Batch, max_cache_length
from runtime.generation.kv.cache_factory import (
    BudgetedCacheFactory,
    KVCacheFactory,
    SinkCacheFactory,
    make_offload_factory,
)
from runtime.generation.kv.manager import WORKING_COPIES, KVCacheManager
from runtime.policy.budget import parse_size
from runtime.store.base import max_decoded_bytes, max_slot_bytes

FREE_MEMORY_SHARE = 0.75
"""Share of free memory that KV caches take by default; the rest is left to the user."""


@dataclass(frozen=True)
class PlannedRun:
    """A group plan with the measurements behind it."""

    plan: GroupPlan
    measured: CostProfile
    was_known: bool
    """True if the costs were measured by an earlier run."""
    kv_budget: int
    """Bytes for KV caches in the memory that computes."""


def kv_demand(
    model: PreTrainedModel, batches: Sequence[Batch], found: CostProfile, config: GroupConfig
) -> KVDemand:
    """Compute the bytes that the batches' KV caches need."""
    num_layers = max(1, model.config.get_text_config().num_hidden_layers)

    def size(batch: Batch) -> int:
        tokens = max_cache_length(batch)
        if config.window:
            tokens = min(tokens, config.sinks + config.window + 1)
        return len(batch) * (found.kv_bytes_fixed + tokens * found.kv_bytes_per_token)

    sums = cumulative_bytes([size(batch) for batch in batches])
    working = WORKING_COPIES * sums(1) // num_layers if config.kv_budget is not None else 0
    return KVDemand(
        batch_size=len(batches[0]),
        num_batches=len(batches),
        kv_bytes=lambda n: sums(n) + working,
        working_bytes=working,
    )


def expert_popularity(model: PreTrainedModel) -> ExpertPopularity:
    """Return the popularity counted by the correlation table, or uniform without one."""
    spec = model.moecast.spec
    predictor = model.moecast.engine.driver.predictor
    hot = spec.top_k
    if isinstance(predictor, CorrelationPredictor):
        hot = predictor.hot or spec.top_k
        if (shares_LE := predictor.shares_LE) is not None:
            return ExpertPopularity(shares_LE, hot)
    return ExpertPopularity.even(spec.num_layers, spec.num_experts, spec.top_k, hot)


def parse_kv_budget(config: GroupConfig, device: torch.device) -> int:
    """Bytes for KV caches: the configured budget, or a share of free memory."""
    if config.kv_budget is not None:
        return parse_size(config.kv_budget, name="kv_budget")
    on_gpu = device.type == "cuda"
    free = torch.cuda.mem_get_info(device)[0] if on_gpu else available_memory_bytes()
    return int(FREE_MEMORY_SHARE * free)


def plan_batches(
    model: PreTrainedModel, batches: Sequence[Batch], config: GroupConfig, *, store: StoreConfig
) -> PlannedRun:
    """Measure this machine, or load an earlier measurement, and plan.

    Raises:
        PlanError: KV caches would not fit.
    """
    found, was_known = load_or_measure(model, batches[0], store=store)
    budget = parse_kv_budget(config, model.device)
    made = plan_group(
        kv_demand(model, batches, found, config),
        found.costs,
        expert_popularity(model),
        kv_budget=budget,
        offloads=config.kv_budget is not None and config.kv_offload is not Offload.NONE,
        asked=config.asked_n,
    )
    return PlannedRun(made, found, was_known, budget)


def make_kv_caches(model: PreTrainedModel, config: GroupConfig, kv_budget: int) -> KVCacheFactory:
    """Make the KV cache factory for the settings.

    Raises:
        PlanError: the model's layers do not keep the keys and values of all tokens.
    """
    if config.window:
        return SinkCacheFactory(model, sinks=config.sinks, window=config.window)
    if config.kv_budget is None:
        return KVCacheFactory()
    outside = make_offload_factory(config.kv_offload, model.device, config.kv_folder)
    return BudgetedCacheFactory(model, KVCacheManager(kv_budget, outside))


BUFFERS = 16
"""Slots for experts in transfer, as in configs/system/klotski.yaml."""


def with_whole_layer_buffers(system: SystemConfig) -> SystemConfig:
    """Give a system with a fixed set of experts buffers for a whole layer.

    No expert that a group has requested is then evicted before it is used.
    """
    if system.eviction != "static":
        return system
    options = {**system.eviction_options, "whole_layer": True}
    return replace(system, eviction_options=options)


def load_with_plan(config: BatchConfig, batches: list[Batch]) -> tuple[PreTrainedModel, PlannedRun]:
    """Load the model and plan the run.

    With `memory`, and where `budget=auto` finds less free memory than experts and KV caches need,
    the model is loaded twice: with half of the memory to measure, then with the share that the plan
    gives to experts.

    Raises:
        PlanError: KV caches would not fit.
        BudgetError: the memory does not hold the experts of one step.
    """
    config = replace(config, system=with_whole_layer_buffers(config.system))
    memory = None if config.memory is None else parse_size(config.memory, name="memory")
    kv_budget = None if config.kv_budget is None else parse_size(config.kv_budget, name="kv_budget")
    reserve = KVReserve(num_bytes=kv_budget, share=0.5 if kv_budget is None else 0.0)
    with ExitStack() as closing:
        budget = config.budget if memory is None else memory // 2
        model = load_served(config, budget=budget, kv_reserve=reserve)
        closing.callback(model.moecast.close)
        auto = model.moecast.auto_budget
        if auto is not None and kv_budget is None and not auto.holds_all:
            memory = auto.free.room
        if memory is None:
            planned = plan_batches(model, batches, config, store=config.store)
            closing.pop_all()
            return model, planned
        found, was_known = load_or_measure(model, batches[0], store=config.store)
        expert_bytes, made = split_memory(
            memory,
            kv_demand(model, batches, found, config),
            found.costs,
            expert_popularity(model),
            least_experts=_least_expert_bytes(model),
            asked=config.asked_n,
        )
    note = (
        f"memory split: {expert_bytes / MIB:.1f} MiB for experts, "
        f"{made.kv_bytes / MIB:.1f} MiB for KV caches"
    )
    made = replace(made, notes=[*made.notes, note])
    # Nothing counts the bytes of Transformers' own caches: the plan alone keeps them within memory.
    return (
        load_served(replace(config, memory=None), budget=expert_bytes),
        PlannedRun(made, found, was_known, made.kv_bytes),
    )


def _least_expert_bytes(model: PreTrainedModel) -> int:
    """Bytes of the slots for experts in transfer."""
    store, spec = model.moecast.engine.store, model.moecast.spec
    slots = min(max(BUFFERS, spec.top_k + 1), spec.num_layers * spec.num_experts)
    return slots * max_slot_bytes(store) + store.scratch_bytes + max_decoded_bytes(store)
