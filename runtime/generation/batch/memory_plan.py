"""Plan the group size and the memory of experts and KV caches for a batch run."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel

from predictors.correlation import CorrelationPredictor
from predictors.units import MIB
from runtime.accelerator import is_accelerator, read_free_memory
from runtime.config import StoreConfig
from runtime.engine.loading import KVReserve, load_served
from runtime.engine.memory import available_memory_bytes
from runtime.errors import PlanError
from runtime.generation.batch.cost_profile import CostProfile, load_or_measure
from runtime.generation.batch.dense_placement import quantise_attention, stream_dense_weights
from runtime.generation.batch.group_planner import (
    ExpertPopularity,
    GroupPlan,
    KVDemand,
    PlannerCosts,
    cumulative_bytes,
    plan_group,
    split_memory,
)
from runtime.generation.batch.prompts import Batch, max_cache_length
from runtime.generation.config import BatchConfig, DensePlacement, GroupConfig, Offload
from runtime.generation.kv_caches import (
    BudgetedCacheFactory,
    KVCacheFactory,
    SinkCacheFactory,
    make_offload_factory,
)
from runtime.generation.kv_offload import WORKING_COPIES, KVCacheManager
from runtime.hf.dense_stream import count_buffer_bytes, count_dense_bytes, find_dense_layers
from runtime.policy.budget import parse_size
from runtime.store.base import max_decoded_bytes, max_slot_bytes

FREE_MEMORY_SHARE = 0.75
"""Share of free memory that KV caches take by default; the rest is left to the user."""


ACTIVATIONS = 3
"""Arrays of a prompt's tokens times the hidden size that a batch holds while it waits for experts:
the residual, the experts' input and the sum of their outputs."""


@dataclass(frozen=True)
class PlannedRun:
    """A group plan with the measurements behind it."""

    plan: GroupPlan
    measured: CostProfile
    was_known: bool
    """True if the costs were measured by an earlier run."""
    kv_budget: int
    """Bytes for KV caches in the memory that computes."""
    dense: DensePlacement
    """`memory` or `stream`."""
    dense_bytes: int
    """Bytes of the layers' dense weights in memory, or of the buffers that they are read into."""


def kv_demand(
    model: PreTrainedModel,
    batches: Sequence[Batch],
    profile: CostProfile,
    config: GroupConfig,
    *,
    with_activations: bool = False,
) -> KVDemand:
    """Compute the bytes that the batches' KV caches need, and, if asked, their activations."""
    num_layers = max(1, model.config.get_text_config().num_hidden_layers)

    width = model.config.get_text_config().hidden_size
    activation_bytes = ACTIVATIONS * width * model.dtype.itemsize

    def size(batch: Batch) -> int:
        tokens = max_cache_length(batch)
        if config.window:
            tokens = min(tokens, config.sinks + config.window + 1)
        row_bytes = profile.kv_bytes_fixed + tokens * profile.kv_bytes_per_token
        if with_activations:
            row_bytes += max(len(prompt.tokens) for prompt in batch) * activation_bytes
        return len(batch) * row_bytes

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
    free = read_free_memory(device) if is_accelerator(device) else available_memory_bytes()
    return int(FREE_MEMORY_SHARE * free)


def dense_size(model: PreTrainedModel, placement: DensePlacement, costs: PlannerCosts) -> int:
    """Return the bytes of memory that the layers' dense weights take in this placement."""
    layers = find_dense_layers(model, model.moecast.layers, with_gates=costs.calls_gates)
    streams = placement is DensePlacement.STREAM
    return count_buffer_bytes(layers) if streams else count_dense_bytes(layers)


def choose_costs(placement: DensePlacement, costs: PlannerCosts) -> PlannerCosts:
    """Return the costs of a run with this placement of dense weights."""
    return costs if placement is DensePlacement.STREAM else costs.with_dense_in_memory()


def plan_batches(
    model: PreTrainedModel, batches: Sequence[Batch], config: GroupConfig, *, store: StoreConfig
) -> PlannedRun:
    """Measure this machine, or load an earlier measurement, and plan.

    Dense weights, which the model has loaded, stay in memory unless the settings say otherwise.

    Raises:
        PlanError: KV caches would not fit.
    """
    profile, was_known = load_or_measure(model, batches[0], store=store)
    streams = config.dense is DensePlacement.STREAM
    dense = DensePlacement.STREAM if streams else DensePlacement.MEMORY
    budget = parse_kv_budget(config, model.device)
    made = plan_group(
        kv_demand(model, batches, profile, config),
        choose_costs(dense, profile.costs),
        expert_popularity(model),
        kv_budget=budget,
        offloads=config.kv_budget is not None and config.kv_offload is not Offload.NONE,
        asked=config.asked_n,
    )
    size = dense_size(model, dense, profile.costs)
    return PlannedRun(made, profile, was_known, budget, dense, size)


def make_kv_caches(model: PreTrainedModel, config: GroupConfig, kv_budget: int) -> KVCacheFactory:
    """Make the KV cache factory for the settings.

    Raises:
        PlanError: the model's layers do not keep the keys and values of all tokens.
    """
    if config.window:
        return SinkCacheFactory(model, sinks=config.sinks, window=config.window)
    if config.kv_budget is None:
        return KVCacheFactory()
    outside = make_offload_factory(config.kv_offload, model.device)
    return BudgetedCacheFactory(model, KVCacheManager(kv_budget, outside))


def load_with_plan(config: BatchConfig, batches: list[Batch]) -> tuple[PreTrainedModel, PlannedRun]:
    """Load the model and plan the run.

    With `memory`, and where `budget=auto` finds less free memory than experts and KV caches need,
    the model is loaded twice: with half of the memory to measure, then with the share that the plan
    gives to experts. Both times all dense weights are read into memory before they are moved out.

    Raises:
        PlanError: KV caches would not fit.
        BudgetError: the memory does not hold the experts of one step.
    """
    memory = None if config.memory is None else parse_size(config.memory, name="memory")
    kv_budget = None if config.kv_budget is None else parse_size(config.kv_budget, name="kv_budget")
    reserve = KVReserve(num_bytes=kv_budget, share=0.5 if kv_budget is None else 0.0)
    with ExitStack() as closing:
        budget = config.budget if memory is None else memory // 2
        model = load_served(config, budget=budget, kv_reserve=reserve)
        closing.callback(model.moecast.close)
        if config.quantise_attention:
            quantise_attention(model)
        auto = model.moecast.auto_budget
        is_auto = auto is not None and kv_budget is None and not auto.holds_all
        if memory is None and not is_auto:
            planned = plan_batches(model, batches, config, store=config.store)
            _place_dense(model, planned, config.store)
            closing.pop_all()
            return model, planned
        profile, was_known = load_or_measure(model, batches[0], store=config.store)
        if memory is None:
            assert auto is not None
            in_memory = dense_size(model, DensePlacement.MEMORY, profile.costs)
            memory = auto.free.room + in_memory
        expert_bytes, planned = plan_memory(memory, model, batches, profile, config)
    planned = replace(planned, was_known=was_known)
    # Nothing counts the bytes of Transformers' own caches: the plan alone keeps them within memory.
    model = load_served(replace(config, memory=None), budget=expert_bytes)
    try:
        if config.quantise_attention:
            quantise_attention(model)
        _place_dense(model, planned, config.store)
    except BaseException:
        model.moecast.close()
        raise
    return model, planned


def plan_memory(
    memory: int,
    model: PreTrainedModel,
    batches: Sequence[Batch],
    profile: CostProfile,
    config: GroupConfig,
) -> tuple[int, PlannedRun]:
    """Split memory between experts, KV caches and dense weights, and choose the latter's place.

    Dense weights stay in memory, where they need no transfers, unless it does not hold them, or
    only a run that streams them hides its transfers: it has more memory for KV caches, so that n
    may be larger.

    Returns:
        The experts' bytes and the plan.

    Raises:
        PlanError: no allowed place of the dense weights fits.
    """
    made: dict[DensePlacement, tuple[int, PlannedRun]] = {}
    error: PlanError | None = None
    for placement in (DensePlacement.MEMORY, DensePlacement.STREAM):
        if config.dense not in (DensePlacement.AUTO, placement):
            continue
        size = dense_size(model, placement, profile.costs)
        try:
            expert_bytes, plan = split_memory(
                memory,
                kv_demand(model, batches, profile, config, with_activations=True),
                choose_costs(placement, profile.costs),
                expert_popularity(model),
                least_experts=_least_expert_bytes(model),
                dense_bytes=size,
                asked=config.asked_n,
            )
        except PlanError as failure:
            error = failure
            continue
        buffers = "buffers of " if placement is DensePlacement.STREAM else ""
        note = (
            f"memory split: {expert_bytes / MIB:.1f} MiB for experts, {plan.kv_bytes / MIB:.1f} "
            f"MiB for KV caches and activations, {size / MIB:.1f} MiB for {buffers}dense weights"
        )
        plan = replace(plan, notes=[*plan.notes, note])
        planned = PlannedRun(plan, profile, False, plan.kv_bytes, placement, size)
        made[placement] = expert_bytes, planned
    if not made:
        assert error is not None
        raise error
    chosen = next((run for run in made.values() if run[1].plan.hides_transfers), None)
    return chosen or next(iter(made.values()))


def _place_dense(model: PreTrainedModel, planned: PlannedRun, store: StoreConfig) -> None:
    """Move the dense weights out of memory if the plan says so."""
    if planned.dense is DensePlacement.STREAM:
        gates = planned.measured.costs.calls_gates
        stream_dense_weights(model, store, with_gates=gates)


def _least_expert_bytes(model: PreTrainedModel) -> int:
    """Bytes of the slots for a layer's experts and the hot ones of the next."""
    store, spec = model.moecast.engine.store, model.moecast.spec
    slots = min(spec.num_experts + spec.top_k, spec.num_layers * spec.num_experts)
    return slots * max_slot_bytes(store) + store.scratch_bytes + max_decoded_bytes(store)
