"""Builds a system's policy core from its configuration, for live runs and simulated ones alike."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from predictors.spec import ModelSpec
from runtime.config import SystemConfig
from runtime.policy.cache import ExpertCache, divide_among_layers
from runtime.policy.device_cache import DeviceCache
from runtime.policy.eviction.base import EvictionPolicy, Expert
from runtime.policy.eviction.klotski import LayerWindowEviction
from runtime.policy.eviction.registry import make_eviction_policy
from runtime.policy.placement import ExpertPlacement
from runtime.policy.queue import find_prefetch_order
from runtime.policy.tier import CacheTier


def adapt_to_link(system: SystemConfig, *, slows_computing: bool) -> SystemConfig:
    """Returns the system as it runs over this link to the computing tier.

    Where transfers slow the computation down, idle links are left idle: on two cores a computation
    runs at two thirds of its speed during a read, and at a budget of 75 % the time per output token
    was 75 ms with idle prefetching, 58 ms without (benchmarks/README.md).
    """
    if system.knows_future or not slows_computing:
        return system  # nothing that Belady's policy fetches is fetched in vain
    return replace(system, idle_prefetch=False)


def build_device_cache(
    system: SystemConfig,
    spec: ModelSpec,
    *,
    num_slots: Sequence[Sequence[int]],
    first_slots: Sequence[Sequence[Sequence[int]]] | None = None,
    chunk_bytes: Sequence[Sequence[int]],
    placement: ExpertPlacement | None = None,
    device: int = 0,
) -> DeviceCache:
    """Builds the cache of one device or more.

    Args:
        num_slots: Of each device, the experts that each of its tiers holds, the computing one
            first.
        first_slots: Likewise, of each layer, the first slot that is large enough; None: all are.
        chunk_bytes: Bytes of each chunk, of each layer's experts.
        placement: Experts of each of several devices; None: the only one has all.
        device: Number of the first of these devices in the placement.
    """
    tiers = []
    if first_slots is None:
        first_slots = [[[0] * spec.num_layers] * len(slots) for slots in num_slots]
    pairs = zip(num_slots, first_slots, strict=True)
    for number, (slots, firsts) in enumerate(pairs, start=device):
        tiers += _build_tiers(system, spec, slots, firsts, chunk_bytes, placement, number)
    return DeviceCache(tiers, num_experts=spec.num_experts, system=system, placement=placement)


def _build_tiers(
    system: SystemConfig,
    spec: ModelSpec,
    num_slots: Sequence[int],
    first_slots: Sequence[Sequence[int]],
    chunk_bytes: Sequence[Sequence[int]],
    placement: ExpertPlacement | None,
    device: int,
) -> list[CacheTier]:
    """Builds the tiers of one device.

    A tier is divided among the layers only if it holds a step's experts of every layer.
    """
    if placement is not None:
        system = _restrict_knowledge(system, spec, placement, device)
    shape = {"num_layers": spec.num_layers, "num_experts": spec.num_experts}
    make_policy: Callable[[], EvictionPolicy] = partial(
        make_eviction_policy,
        system.eviction,
        **shape,
        top_k=spec.top_k,
        options=system.eviction_options,
    )
    top_policy = make_policy()

    def is_held_elsewhere(expert: Expert) -> bool:
        is_own = placement is None or placement.device(expert) == device
        return not is_own or top_policy.is_permanent(expert)

    if system.host_window:
        make_policy = partial(LayerWindowEviction, **shape, is_held_elsewhere=is_held_elsewhere)
    policies = [top_policy, *(make_policy() for _ in num_slots[1:])]
    tiers: list[CacheTier] = []
    below: CacheTier | None = None
    sizes = zip(num_slots, first_slots, strict=True)
    for (slots, firsts), policy in zip(reversed([*sizes]), reversed(policies), strict=True):
        own_slots = divide_among_layers(slots, firsts)
        cache = ExpertCache(
            num_slots=slots,
            num_layers=spec.num_layers,
            per_layer=system.per_layer and min(map(len, own_slots)) >= spec.top_k,
            policy=policy,
            first_slots=firsts,
        )
        below = CacheTier(
            cache,
            chunk_bytes=chunk_bytes,
            chunked=system.chunked,
            whole_requests=system.whole_requests,
            least_prefetch=system.least_prefetch,
            order=find_prefetch_order(system.priority),
            below=below,
            idle_prefetch=system.idle_prefetch or isinstance(policy, LayerWindowEviction),
            device=device,
        )
        tiers.insert(0, below)
    return tiers


def _restrict_knowledge(
    system: SystemConfig, spec: ModelSpec, placement: ExpertPlacement, device: int
) -> SystemConfig:
    """Returns the system with what its eviction knows of the device's experts only.

    These are the `counts` of static eviction and the `future` of Belady's.
    """
    options = dict(system.eviction_options)
    if "counts" in options:
        options["counts"] = [
            np.where(placement.mask(layer, device, spec.num_experts), counts_E, -1).tolist()
            for layer, counts_E in enumerate(options["counts"])
        ]
    if "future" in options:
        options["future"] = [
            [
                [e for e in chosen if placement.device((layer, e)) == device]
                for layer, chosen in enumerate(layers)
            ]
            for layers in options["future"]
        ]
    return replace(system, eviction_options=options)
