"""Plan the group size and the memory of experts and KV caches for a batch run."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel

from predictors.correlation import CorrelationPredictor
from predictors.units import MIB
from runtime.engine.auto_budget import measure_free_memory
from runtime.engine.loading import KVReserve, load_served
from runtime.errors import PlanError
from runtime.generation.batch.cost_profile import CostProfile, load_or_measure
from runtime.generation.batch.dense_placement import quantise_attention, stream_dense_weights
from runtime.generation.batch.group_planner import ExpertPopularity, GroupPlan, KVDemand, plan_group
from runtime.generation.batch.prompts import Batch, max_cache_length
from runtime.generation.config import BatchConfig, DensePlacement, GroupConfig, Offload
from runtime.generation.kv_caches import (
    KVCacheFactory,
    budgeted_caches,
    make_offload_factory,
    sink_caches,
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
    kv_budget: int
    """Bytes for KV caches in the memory that computes."""
    dense: DensePlacement
    """`memory` or `stream`."""
    dense_bytes: int
    """Bytes of the layers' dense weights in memory, or of the buffers that they are read into."""
    expert_bytes: int | None = None
    """Bytes for experts; None: the plan has not split the memory."""


def kv_demand(
    model: PreTrainedModel,
    batches: Sequence[Batch],
    profile: CostProfile,
    config: GroupConfig,
    *,
    with_activations: bool,
) -> KVDemand:
    """Compute the bytes that the batches' KV caches need, and, if asked, their activations."""
    text = model.config.get_text_config()
    activation_bytes = ACTIVATIONS * text.hidden_size * model.dtype.itemsize

    def size(batch: Batch) -> int:
        tokens = max_cache_length(batch)
        if config.window:
            tokens = min(tokens, config.sinks + config.window + 1)
        row_bytes = profile.cache.of(tokens)
        if with_activations:
            row_bytes += max(len(prompt.tokens) for prompt in batch) * activation_bytes
        return len(batch) * row_bytes

    sizes = [size(batch) for batch in batches]
    working = WORKING_COPIES * sizes[0] // max(1, text.num_hidden_layers)
    return KVDemand(
        batch_size=len(batches[0]),
        batch_bytes=sizes,
        working_bytes=working if config.kv_budget is not None else 0,
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
    return int(FREE_MEMORY_SHARE * measure_free_memory([device])[0])


def make_kv_caches(model: PreTrainedModel, config: GroupConfig, kv_budget: int) -> KVCacheFactory:
    """Make the KV cache factory for the settings.

    Raises:
        PlanError: the model's layers do not keep the keys and values of all tokens.
    """
    if config.window:
        return sink_caches(model, sinks=config.sinks, window=config.window)
    if config.kv_budget is None:
        return KVCacheFactory()
    outside = make_offload_factory(config.kv_offload, model.device)
    return budgeted_caches(model, KVCacheManager(kv_budget, outside))


def plan_run(
    model: PreTrainedModel,
    batches: Sequence[Batch],
    config: GroupConfig,
    measured: CostProfile,
    *,
    memory: int | None = None,
) -> PlannedRun:
    """Choose the group size and the place of the dense weights; split `memory` if it is given.

    Dense weights stay in memory, where they need no transfers. With `memory`, and if the settings
    leave the choice, they are streamed where it does not hold them, or where only a run that
    streams them hides its transfers: it has more memory for KV caches, so that n may be larger.

    Raises:
        PlanError: KV caches, or with `memory` also the experts of a batch, would not fit.
    """
    placements = [config.dense]
    if config.dense is DensePlacement.AUTO:
        placements = [DensePlacement.MEMORY, DensePlacement.STREAM][: 1 if memory is None else 2]
    planned: list[PlannedRun] = []
    for placement in placements:
        try:
            planned.append(_plan_placed(model, batches, config, measured, placement, memory))
        except PlanError:
            if placement is placements[-1] and not planned:
                raise
    return next((run for run in planned if run.plan.hides_transfers), planned[0])


def _plan_placed(
    model: PreTrainedModel,
    batches: Sequence[Batch],
    config: GroupConfig,
    measured: CostProfile,
    dense: DensePlacement,
    memory: int | None,
) -> PlannedRun:
    """Plan with the dense weights in one place.

    Of `memory` the KV caches of the smallest n that hides transfers come first. The rest holds
    experts, which then need no transfer (Klotski, section 6.1: "when there is ample free memory, it
    can be further utilized to reduce some I/O").
    """
    streams, costs = dense is DensePlacement.STREAM, measured.costs
    layers = find_dense_layers(model, model.moecast.layers, with_gates=costs.calls_gates)
    size = count_buffer_bytes(layers) if streams else count_dense_bytes(layers)
    demand = kv_demand(model, batches, measured, config, with_activations=memory is not None)
    if memory is None:
        kv_budget = parse_kv_budget(config, model.device)
    else:
        kv_budget = memory - _least_expert_bytes(model) - size
        if kv_budget < demand.kv_bytes(1):
            raise PlanError(
                f"memory of {memory} bytes is too small: experts in transfer need "
                f"{_least_expert_bytes(model)}, dense weights {size}, one batch's KV cache and "
                f"activations {demand.kv_bytes(1)}; the least is "
                f"memory={memory - kv_budget + demand.kv_bytes(1)}, or use a smaller batch_size"
            )
    plan = plan_group(
        demand,
        costs if streams else costs.with_dense_in_memory(),
        expert_popularity(model),
        kv_budget=kv_budget,
        offloads=config.kv_budget is not None and config.kv_offload is not Offload.NONE,
        asked=config.asked_n,
    )
    if memory is None:
        return PlannedRun(plan, measured, kv_budget, dense, size)
    expert_bytes = memory - size - plan.kv_bytes
    note = (
        f"memory split: {expert_bytes / MIB:.1f} MiB for experts, {plan.kv_bytes / MIB:.1f} "
        f"MiB for KV caches and activations, {size / MIB:.1f} MiB for "
        f"{'buffers of ' if streams else ''}dense weights"
    )
    plan = replace(plan, notes=[*plan.notes, note])
    return PlannedRun(plan, measured, plan.kv_bytes, dense, size, expert_bytes)


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

        def load(budget: str | int, reserve: KVReserve) -> PreTrainedModel:
            model = load_served(config, budget=budget, kv_reserve=reserve)
            closing.callback(model.moecast.close)
            if config.quantise_attention:
                quantise_attention(model)
            return model

        model = load(config.budget if memory is None else memory // 2, reserve)
        measured = load_or_measure(model, batches[0], store=config.store)
        auto, gates = model.moecast.auto_budget, measured.costs.calls_gates
        if memory is None and auto is not None and kv_budget is None and not auto.holds_all:
            memory = auto.free.room + count_dense_bytes(
                find_dense_layers(model, model.moecast.layers, with_gates=gates)
            )
        planned = plan_run(model, batches, config, measured, memory=memory)
        if planned.expert_bytes is not None:
            closing.close()
            del model  # or the second would be loaded next to it
            # Nothing counts the bytes of Transformers' own caches: the plan alone keeps them
            # within memory.
            model = load(planned.expert_bytes, KVReserve())
        if planned.dense is DensePlacement.STREAM:
            stream_dense_weights(model, config.store, with_gates=gates)
        if (codes := model.moecast.dense_codes) is not None:
            codes.stored.clear()  # placed by now, or in memory as what they decode to
        closing.pop_all()
    return model, planned


def _least_expert_bytes(model: PreTrainedModel) -> int:
    """Bytes of the slots for a layer's experts and the hot ones of the next."""
    store, spec = model.moecast.engine.store, model.moecast.spec
    slots = min(spec.num_experts + spec.top_k, spec.num_layers * spec.num_experts)
    return slots * max_slot_bytes(store) + store.scratch_bytes + max_decoded_bytes(store)
