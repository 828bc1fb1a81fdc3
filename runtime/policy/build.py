"""A system's policy core from its configuration: the same for live runs and for simulated ones."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from predictors.spec import ModelSpec
from runtime.config import SystemConfig
from runtime.policy.adaptive_prefetch import AdaptivePrefetch
from runtime.policy.cache import ExpertCache
from runtime.policy.eviction import eviction_policy
from runtime.policy.forecast_scheduler import ForecastScheduler, priority_function
from runtime.policy.placement import Placement
from runtime.policy.prefetcher import Prefetcher, Techniques
from runtime.policy.shards import Shard, Shards
from runtime.policy.tier import Tier


def on_link(system: SystemConfig, *, slows_computing: bool) -> SystemConfig:
    """The system as it runs over this link to the computing tier.

    Where transfers take the processor or the memory that computes, idle links are left idle: on two
    cores a computation runs at two thirds of its speed beside a read, and at 75 % of the experts a
    token took 75 ms with idle time filled, 58 ms without (benchmarks/README.md).
    """
    return replace(system, idle_prefetch=False) if slows_computing else system


def build_prefetcher(
    system: SystemConfig,
    spec: ModelSpec,
    *,
    num_slots: Sequence[int],
    chunk_bytes: Sequence[Sequence[int]],
) -> Prefetcher:
    """Caches, queues and techniques for tiers of `num_slots` experts, the computing tier first.

    `chunk_bytes` are those of each layer. An arena is divided among the layers only where it holds
    a step's experts of every one.
    """
    tiers = build_tiers(system, spec, num_slots=num_slots, chunk_bytes=chunk_bytes)
    return Prefetcher(tiers, techniques=techniques(system))


def build_shards(
    system: SystemConfig,
    spec: ModelSpec,
    *,
    num_slots: Sequence[Sequence[int]],
    chunk_bytes: Sequence[Sequence[int]],
) -> Shards:
    """The same once for each of several devices, with tiers of `num_slots[device]` experts."""
    placement = Placement(len(num_slots))
    shards = [
        build_shard(system, spec, placement, device, num_slots=slots, chunk_bytes=chunk_bytes)
        for device, slots in enumerate(num_slots)
    ]
    return Shards(shards, placement=placement)


def build_shard(
    system: SystemConfig,
    spec: ModelSpec,
    placement: Placement,
    device: int,
    *,
    num_slots: Sequence[int],
    chunk_bytes: Sequence[Sequence[int]],
) -> Shard:
    """One of them."""
    own = of_device(system, spec, placement, device)
    tiers = build_tiers(own, spec, num_slots=num_slots, chunk_bytes=chunk_bytes)
    return Shard(tiers, techniques=techniques(system), placement=placement, device=device)


def of_device(
    system: SystemConfig, spec: ModelSpec, placement: Placement, device: int
) -> SystemConfig:
    """The system as one device runs it: of a fixed popular set (`counts`), its own share."""
    counts_LE = system.eviction_options.get("counts")
    if counts_LE is None:
        return system
    own = [
        np.where(placement.mask(layer, device, spec.num_experts), counts_E, -1).tolist()
        for layer, counts_E in enumerate(counts_LE)
    ]
    return replace(system, eviction_options={**system.eviction_options, "counts": own})


def build_tiers(
    system: SystemConfig,
    spec: ModelSpec,
    *,
    num_slots: Sequence[int],
    chunk_bytes: Sequence[Sequence[int]],
) -> list[Tier]:
    """One device's tiers, each over the one after it."""
    tiers: list[Tier] = []
    below: Tier | None = None
    for slots in reversed(num_slots):
        cache = ExpertCache(
            num_slots=slots,
            num_layers=spec.num_layers,
            per_layer=system.per_layer and slots >= spec.num_layers * spec.top_k,
            policy=eviction_policy(
                system.eviction,
                num_layers=spec.num_layers,
                num_experts=spec.num_experts,
                options=system.eviction_options,
            ),
        )
        below = Tier(
            cache,
            chunk_bytes=chunk_bytes,
            chunked=system.chunked,
            below=below,
            fills_idle=system.idle_prefetch,
        )
        tiers.insert(0, below)
    return tiers


def techniques(system: SystemConfig) -> Techniques:
    """What of promoe's and klotski's techniques is on."""
    return Techniques(
        chunked=system.chunked,
        early_preemption=system.early_preemption,
        reordered=system.reordered,
        cancel=system.cancel,
        hot_first=system.hot_first,
        drop_used=system.drop_used,
    )


def build_scheduler(
    system: SystemConfig, spec: ModelSpec, prefetcher: Prefetcher
) -> ForecastScheduler:
    """What turns forecasts into transfers, with a adaptive_prefetch where the system has one."""
    adaptive_prefetch = None
    if system.adaptive:
        adaptive_prefetch = AdaptivePrefetch()
        adaptive_prefetch.on_change = (
            prefetcher.idle_prefetch if system.idle_prefetch else lambda _: None
        )
    return ForecastScheduler(
        prefetcher,
        top_k=spec.top_k,
        priority=priority_function(system.priority),
        adaptive_prefetch=adaptive_prefetch,
        lookahead_layers=system.lookahead_layers,
        predictor_priority=system.predictor_priority,
    )
