"""A plan for a loaded model and its batches: what was measured, what fits, and the caches' room."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel

from predictors.correlation import Correlation
from predictors.units import MIB
from runtime.budget import parse_size
from runtime.config import StoreConfig, SystemConfig
from runtime.engine.loading import load_served
from runtime.engine.machine import available_memory_bytes
from runtime.generation.batch.batching import Batch, max_cache_length
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
from runtime.generation.kv.cache_factory import (
    BudgetedCacheFactory,
    KVCacheFactory,
    PlainCacheFactory,
    SinkCacheFactory,
    make_offload_factory,
)
from runtime.generation.kv.manager import WORKING_COPIES, KVCacheManager
from runtime.store.base import decoded_bytes, slot_bytes

FREE_MEMORY_SHARE = 0.75
"""Of the memory that is free, what caches take unless told: the rest is the user's."""


@dataclass(frozen=True)
class PlannedRun:
    """What a run goes by."""

    plan: GroupPlan
    measured: CostProfile
    was_known: bool
    """Measured by an earlier run."""
    kv_budget: int
    """Bytes for caches beside the computation."""


def kv_demand(
    model: PreTrainedModel, batches: Sequence[Batch], found: CostProfile, config: GroupConfig
) -> KVDemand:
    """What the batches' caches take."""
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
    """As the correlation table has counted so far; even where there is none."""
    spec = model.moecast.spec
    predictor = model.moecast.engine.driver.predictor
    hot = spec.top_k
    if isinstance(predictor, Correlation):
        hot = predictor.hot or spec.top_k
        if (shares_LE := predictor.shares_LE) is not None:
            return ExpertPopularity(shares_LE, hot)
    return ExpertPopularity.even(spec.num_layers, spec.num_experts, spec.top_k, hot)


def free_bytes(device: torch.device) -> int:
    """Where caches are beside the computation."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_memory_bytes()


def parse_kv_budget(config: GroupConfig, device: torch.device) -> int:
    """Bytes for caches: as asked for, or a share of what is free."""
    if config.kv_budget is None:
        return int(FREE_MEMORY_SHARE * free_bytes(device))
    return parse_size(config.kv_budget, name="kv_budget")


def plan_batches(
    model: PreTrainedModel, batches: Sequence[Batch], config: GroupConfig, *, store: StoreConfig
) -> PlannedRun:
    """Measures, or recalls what was measured, and solves.

    Raises:
        PlanError: caches would not fit.
    """
    found, was_known = load_or_measure(model, batches[0], store=store, again=config.measure_again)
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
    """The caches that the settings ask for.

    Raises:
        PlanError: the model keeps something else than all tokens' keys and values.
    """
    if config.window:
        return SinkCacheFactory(model, sinks=config.sinks, window=config.window)
    if config.kv_budget is None:
        return PlainCacheFactory()
    outside = make_offload_factory(config.kv_offload, model.device, config.kv_folder)
    return BudgetedCacheFactory(model, KVCacheManager(kv_budget, outside))


BUFFERS = 16
"""Experts under way that a step computes from, as in configs/system/klotski.yaml."""


def with_whole_layer_buffers(system: SystemConfig) -> SystemConfig:
    """The system with buffers for a whole layer, where it has buffers beside a fixed set: then
    nothing that a group has asked for is pushed out before it is used, and read again.
    """
    if system.eviction != "static":
        return system
    options = {**system.eviction_options, "whole_layer": True}
    return replace(system, eviction_options=options)


def load_with_plan(config: BatchConfig, batches: list[Batch]) -> tuple[PreTrainedModel, PlannedRun]:
    """The model and the plan.

    With `memory` the model is loaded twice: with half of it, to be measured; then with what the
    plan leaves for its experts.

    Raises:
        PlanError: caches would not fit.
        BudgetError: the memory does not hold one step's experts.
    """
    config = replace(config, system=with_whole_layer_buffers(config.system))
    if config.memory is None:
        model = load_served(config, budget=config.budget)
        return model, _plan_or_close(model, batches, config)
    memory = parse_size(config.memory, name="memory")
    model = load_served(config, budget=memory // 2)
    with model.moecast:
        found, was_known = load_or_measure(
            model, batches[0], store=config.store, again=config.measure_again
        )
        division, made = split_memory(
            memory,
            kv_demand(model, batches, found, config),
            found.costs,
            expert_popularity(model),
            least_experts=_least_expert_bytes(model),
            asked=config.asked_n,
        )
    note = (
        f"memory divided: {division.experts / MIB:.1f} MiB for experts, "
        f"{division.caches / MIB:.1f} MiB for caches"
    )
    made = replace(made, notes=[*made.notes, note])
    # Of caches that Transformers makes no byte is counted: the plan is what keeps them in.
    return (
        load_served(replace(config, memory=None), budget=division.experts),
        PlannedRun(made, found, was_known, division.caches),
    )


def _least_expert_bytes(model: PreTrainedModel) -> int:
    """Bytes of the experts under way."""
    store, spec = model.moecast.engine.store, model.moecast.spec
    slots = min(max(BUFFERS, spec.top_k + 1), spec.num_layers * spec.num_experts)
    return slots * slot_bytes(store) + store.scratch_bytes + decoded_bytes(store)


def _plan_or_close(model: PreTrainedModel, batches: list[Batch], config: BatchConfig) -> PlannedRun:
    """The plan; where there is none the model is closed."""
    try:
        return plan_batches(model, batches, config, store=config.store)
    except BaseException:
        model.moecast.close()
        raise
