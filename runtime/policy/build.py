"""Builds a system's policy core from its configuration, for live runs and simulated ones alike."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from predictors.spec import ModelSpec
from runtime.config import SystemConfig
from runtime.policy.adaptive_prefetch import AdaptivePrefetch
from runtime.policy.cache import ExpertCache
from runtime.policy.device_cache import DeviceCache
from runtime.policy.eviction.registry import make_eviction_policy
from runtime.policy.forecast_scheduler import ForecastScheduler
from runtime.policy.multi_device_cache import DeviceCaches, MultiDeviceCache
from runtime.policy.placement import ExpertPlacement
from runtime.policy.tier import CacheTier


def adapt_to_link(system: SystemConfig, *, slows_computing: bool) -> SystemConfig:
    """Returns the system as it runs over this link to the computing tier.

    Where transfers slow the computation down, idle links are left idle: on two cores a computation
    runs at two thirds of its speed during a read, and at a budget of 75 % the time per output token
    was 75 ms with idle prefetching, 58 ms without (benchmarks/README.md).
    """
    return replace(system, idle_prefetch=False) if slows_computing else system


def build_device_cache(
    system: SystemConfig,
    spec: ModelSpec,
    *,
    num_slots: Sequence[int],
    chunk_bytes: Sequence[Sequence[int]],
    placement: ExpertPlacement | None = None,
    device: int = 0,
) -> DeviceCache:
    """Builds the cache of one device with tiers of `num_slots` experts, the computing tier first.

    A tier is divided among the layers only if it holds a step's experts of every layer.

    Args:
        chunk_bytes: Bytes of each chunk, of each layer's experts.
        placement: Experts of each of several devices; None: this one has all.
    """
    if placement is not None:
        system = _restrict_counts(system, spec, placement, device)
    tiers: list[CacheTier] = []
    below: CacheTier | None = None
    for slots in reversed(num_slots):
        cache = ExpertCache(
            num_slots=slots,
            num_layers=spec.num_layers,
            per_layer=system.per_layer and slots >= spec.num_layers * spec.top_k,
            policy=make_eviction_policy(
                system.eviction,
                num_layers=spec.num_layers,
                num_experts=spec.num_experts,
                options=system.eviction_options,
            ),
        )
        below = CacheTier(
            cache,
            chunk_bytes=chunk_bytes,
            chunked=system.chunked,
            below=below,
            idle_prefetch=system.idle_prefetch,
        )
        tiers.insert(0, below)
    return DeviceCache(tiers, system=system, placement=placement, device=device)


def build_multi_device_cache(
    system: SystemConfig,
    spec: ModelSpec,
    *,
    num_slots: Sequence[Sequence[int]],
    chunk_bytes: Sequence[Sequence[int]],
) -> MultiDeviceCache:
    """Builds a cache for each of several devices, with tiers of `num_slots[device]` experts."""
    placement = ExpertPlacement(len(num_slots))
    devices = [
        build_device_cache(
            system,
            spec,
            num_slots=slots,
            chunk_bytes=chunk_bytes,
            placement=placement,
            device=device,
        )
        for device, slots in enumerate(num_slots)
    ]
    return MultiDeviceCache(devices, placement=placement)


def _restrict_counts(
    system: SystemConfig, spec: ModelSpec, placement: ExpertPlacement, device: int
) -> SystemConfig:
    """Returns the system with `counts` (of static eviction) of the device's experts only."""
    counts_LE = system.eviction_options.get("counts")
    if counts_LE is None:
        return system
    own = [
        np.where(placement.mask(layer, device, spec.num_experts), counts_E, -1).tolist()
        for layer, counts_E in enumerate(counts_LE)
    ]
    return replace(system, eviction_options={**system.eviction_options, "counts": own})


def build_scheduler(
    system: SystemConfig, spec: ModelSpec, cache: DeviceCaches
) -> ForecastScheduler:
    """Builds the scheduler of forecasts, adaptive if the system is."""
    adaptive_prefetch = None
    if system.adaptive:
        adaptive_prefetch = AdaptivePrefetch()
        if system.idle_prefetch:
            adaptive_prefetch.on_change = cache.set_idle_prefetch
    return ForecastScheduler(
        cache,
        top_k=spec.top_k,
        priority=system.priority,
        adaptive_prefetch=adaptive_prefetch,
        lookahead_layers=system.lookahead_layers,
        predictor_priority=system.predictor_priority,
    )
