"""Memory for experts and for caches, as given or as the planner divides it (klotski 6.1)."""

from dataclasses import replace

from transformers import PreTrainedModel

from runtime.budget import parse_size
from runtime.config import SystemConfig
from runtime.engine.loading import load_served
from runtime.generation.batch.config import BatchConfig
from runtime.generation.batch.measure import remembered
from runtime.generation.batch.planner import divided
from runtime.generation.batch.planning import Planned, demand_of, planned, popularity_of
from runtime.generation.batch.rows import Batch
from runtime.store.base import decoded_bytes, slot_bytes

MIB = 2**20
BUFFERS = 16
"""Experts under way that a step computes from, as in configs/system/klotski.yaml."""


def for_groups(system: SystemConfig) -> SystemConfig:
    """The system with buffers for a whole layer, where it has buffers beside a fixed set: then
    nothing that a group has asked for is pushed out before it is used, and read again.
    """
    if system.eviction != "static":
        return system
    options = {**system.eviction_options, "whole_layer": True}
    return replace(system, eviction_options=options)


def served(config: BatchConfig, batches: list[Batch]) -> tuple[PreTrainedModel, Planned]:
    """The model and the plan.

    With `memory` the model is loaded twice: with half of it, to be measured; then with what the
    plan leaves for its experts.

    Raises:
        PlanError: caches would not fit.
        BudgetError: the memory does not hold one step's experts.
    """
    config = replace(config, system=for_groups(config.system))
    if config.memory is None:
        model = load_served(config, budget=config.budget)
        return model, _or_closed(model, batches, config)
    memory = parse_size(config.memory, name="memory")
    model = load_served(config, budget=memory // 2)
    with model.moecast:
        found, was_known = remembered(
            model, batches[0], store=config.store, again=config.measure_again
        )
        division, made = divided(
            memory,
            demand_of(model, batches, found, config),
            found.costs,
            popularity_of(model),
            least_experts=_least(model),
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
        Planned(made, found, was_known, division.caches),
    )


def _least(model: PreTrainedModel) -> int:
    """Bytes of the experts under way."""
    store, spec = model.moecast.engine.store, model.moecast.spec
    slots = min(max(BUFFERS, spec.top_k + 1), spec.num_layers * spec.num_experts)
    return slots * slot_bytes(store) + store.scratch_bytes + decoded_bytes(store)


def _or_closed(model: PreTrainedModel, batches: list[Batch], config: BatchConfig) -> Planned:
    """The plan; where there is none the model is closed."""
    try:
        return planned(model, batches, config, store=config.store)
    except BaseException:
        model.moecast.close()
        raise
