"""Builds the arenas, rings, policy core and engine of one model."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from predictors.base import Predictor
from predictors.spec import ModelSpec
from runtime.accelerator import is_accelerator, open_accelerator
from runtime.config import SystemConfig
from runtime.engine.auto_budget import measure_free_memory
from runtime.engine.driver import PredictorDriver
from runtime.engine.engine import Engine
from runtime.engine.forecasters import LearnedStore
from runtime.engine.host_compute import HostCompute
from runtime.engine.predictor_drift import DriftMonitor
from runtime.errors import BudgetError
from runtime.hf.model_faults import is_out_of_memory
from runtime.policy.budget import Budget, SlotCounts, SlotRequirements, divide_slots
from runtime.policy.build import adapt_to_link, build_device_cache
from runtime.policy.forecast_scheduler import ForecastScheduler
from runtime.policy.placement import ExpertPlacement, RankPart, place_experts
from runtime.store.base import ExpertStore, max_decoded_bytes, slot_sizes
from runtime.store.layout import ExpertLayout
from runtime.transfer.arena import Arena, find_near_cpus, run_near
from runtime.transfer.copies import ArenaCopies, DeviceRing
from runtime.transfer.file_ring import StoreRing
from runtime.transfer.loop import TierLink, TimelineSink
from runtime.transfer.ring import Arrivals, Ring
from runtime.transfer.thread_ring import ThreadRing, make_arrivals
from runtime.transfer.watched_loop import WatchedLoop

HOST_SHARE = 0.75
"""Share of the free memory that a host arena takes by default."""
HOST = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Policies and predictors of an engine."""

    system: SystemConfig
    predictor: Predictor | None = None
    reuse_predictor: Predictor | None = None
    timeline: TimelineSink | None = None
    learned: LearnedStore | None = None
    """Keeps what the predictor learns; None: it is lost when the model is closed."""
    drift: DriftMonitor | None = None
    """Compares the predictor's accuracy with its card; None: there is nothing to compare with."""
    part: RankPart | None = None
    """Experts that this process serves, of a model on one device; None: all."""


FilledArena = tuple[Arena, Ring]
"""Memory for experts and the ring that fills it."""


def build_engine(
    store: ExpertStore,
    spec: ModelSpec,
    options: EngineOptions,
    *,
    budget: Budget,
    host_budget: Budget | None = None,
    num_processes: int = 1,
    devices: Sequence[torch.device] = (HOST,),
) -> Engine:
    """Return an engine that serves the store's experts from a memory budget.

    On the CPU there is one tier unless a host budget asks for another below it: then experts are
    copied from arena to arena, as they would be to a device.

    Args:
        store: Has the experts.
        spec: The model.
        options: With `part`, a budget in percent is a share of that part's experts.
        budget: Budget for experts where they are computed, on all devices together.
        host_budget: Budget of a host tier below the devices; by default all experts, or what free
            memory allows. On the CPU there is no lower tier by default.
        num_processes: Processes on this machine that each take their part of what free memory
            allows.
        devices: Each gets an arena and a ring.
    """
    part = options.part
    has_host = needs_host_tier(devices, host_budget)
    top, host = size_tiers(store, spec, has_host=has_host, part=part)
    placement = place_experts(store.experts_per_layer, len(devices))
    slots = count_device_slots(budget, top, store, placement)
    host_slots: list[SlotCounts | None] = [None] * len(devices)
    if has_host:
        host_budget = host_budget or choose_host_budget(host, num_processes)
        host_slots = [*count_device_slots(host_budget, host, store, placement)]
    arrivals = make_arrivals()
    tiers = [
        allocate_arenas(
            store,
            device,
            slots[number],
            host_slots[number],
            arrivals,
            cpus=find_near_cpus(device, number),
            closes=number == len(devices) - 1,
        )
        for number, device in enumerate(devices)
    ]
    return connect(store, spec, tiers, arrivals, options)


def needs_host_tier(devices: Sequence[torch.device], host_budget: Budget | None) -> bool:
    """Return whether host memory is a tier below: of accelerators, and with a host budget."""
    return is_accelerator(devices[0]) or host_budget is not None


def size_tiers(
    store: ExpertStore, spec: ModelSpec, *, has_host: bool, part: RankPart | None = None
) -> tuple[SlotRequirements, SlotRequirements]:
    """Return the sizes of the computing and the host tier."""
    scratch_bytes, decoded = store.scratch_bytes, max_decoded_bytes(store)
    owned = store.experts_per_layer  # a few layers may have less than the others
    if part is not None:
        owned = [part.blocks.block_size] * store.num_layers
    top = SlotRequirements(
        experts=count_experts(store, owned),
        top_k=spec.top_k,
        scratch_bytes=decoded if has_host else scratch_bytes + decoded,
    )
    return top, replace(top, scratch_bytes=scratch_bytes)


def count_experts(store: ExpertStore, owned: Sequence[int]) -> SlotCounts:
    """Return so many of each layer's experts, by the size of the slot that they need."""
    counts = Counter[int]()
    for size, num_experts in zip(slot_sizes(store.layouts), owned, strict=True):
        counts[size] += num_experts
    return +counts


def count_device_slots(
    budget: Budget, needs: SlotRequirements, store: ExpertStore, placement: ExpertPlacement
) -> list[SlotCounts]:
    """Return the slots of each device; the budget is that of all of them together."""
    if placement.num_devices == 1:
        return divide_slots(budget, needs, [needs.experts])
    shape = {"num_layers": store.num_layers, "num_experts": store.num_experts}
    devices = range(placement.num_devices)
    owned = [count_experts(store, placement.num_owned(device, **shape)) for device in devices]
    return divide_slots(budget, needs, owned)


def choose_host_budget(needs: SlotRequirements, num_processes: int = 1) -> Budget:
    """Return the budget of a host tier below a device: all experts, or what free memory allows."""
    (available,) = measure_free_memory([HOST], num_processes=num_processes)
    return Budget(min(needs.total_bytes, int(HOST_SHARE * available)), option="host_budget")


def allocate_arenas(
    store: ExpertStore,
    device: torch.device,
    slots: SlotCounts,
    host_slots: SlotCounts | None,
    arrivals: Arrivals,
    *,
    cpus: frozenset[int] | None,
    closes: bool,
) -> list[FilledArena]:
    """Return one device's arenas, in memory near `cpus`, the computing tier's first.

    Args:
        closes: The store is closed with its ring; off where others read from it too.

    Raises:
        BudgetError: There is not so much memory.
    """
    with run_near(cpus):
        if host_slots is None:
            arena = allocate(store.layouts, slots)
            return [(arena, StoreRing(arrivals, store, arena, cpus=cpus, closes=closes))]
        accelerator = open_accelerator(device)
        arena = allocate(store.layouts, slots, device=device)
        pinned = accelerator is not None and accelerator.pins_memory
        host = allocate(store.host_layouts, host_slots, option="host_budget", pinned=pinned)
        copies = ArenaCopies(host, arena)
        ring: Ring = (
            ThreadRing(arrivals, copies.transfer, name="copy", cpus=cpus)
            if accelerator is None
            else DeviceRing(arrivals, copies, accelerator)
        )
        reads = StoreRing(arrivals, store, host, cpus=cpus, closes=closes)
        return [(arena, ring), (host, reads)]


def allocate(
    layouts: Sequence[ExpertLayout],
    slots: SlotCounts,
    *,
    option: str = "budget",
    device: torch.device = HOST,
    pinned: bool = False,
) -> Arena:
    """Return an arena; raises BudgetError, which names the option, if it does not fit."""
    try:
        return Arena(layouts, slots, device=device, pinned=pinned)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        (free,) = measure_free_memory([device])
        raise BudgetError(
            f"{option}: {sum(slots.values())} experts of {max(slots)} bytes do not fit on "
            f"{device}, where {free} bytes are free next to the other weights; KV caches and "
            f"activations need some of them, too. Take "
            f"{'budget=auto, or ' * (option == 'budget')}a smaller {option}"
        ) from error


def connect(
    store: ExpertStore,
    spec: ModelSpec,
    devices: Sequence[Sequence[FilledArena]],
    arrivals: Arrivals,
    options: EngineOptions,
) -> Engine:
    """Return an engine over each device's tiers, the computing one first."""
    slows_computing = not isinstance(devices[0][0][1], DeviceRing)
    system = adapt_to_link(options.system, slows_computing=slows_computing)
    part = options.part
    placement = part.blocks if part else place_experts(store.experts_per_layer, len(devices))
    cache = build_device_cache(
        replace(system, chunked=False),  # a ring interrupts prefetches between chunks by itself
        spec,
        num_slots=[[arena.num_slots for arena, _ in tiers] for tiers in devices],
        first_slots=[[arena.first_slots for arena, _ in tiers] for tiers in devices],
        chunk_bytes=[layout.chunk_bytes for layout in store.layouts],
        placement=None if placement == ExpertPlacement() else placement,
        device=part.rank if part else 0,
    )
    numbered = [(*tier, number) for number, tiers in enumerate(devices) for tier in tiers]
    links = [
        TierLink(
            ("disk" if tier.below is None else "copy") + (f" {number}" if len(devices) > 1 else ""),
            tier,
            ring,
        )
        for tier, (_, ring, number) in zip(cache.tiers, numbered, strict=True)
    ]
    driver = PredictorDriver(
        options.predictor if system.prefetch else None,
        ForecastScheduler(cache, top_k=spec.top_k),
        options.reuse_predictor,
        learned=options.learned,
        drift=options.drift if system.prefetch else None,
    )
    driver.timeline = options.timeline
    host_compute = None
    if system.hybrid:
        host_compute = HostCompute(cache, devices[0][1][0], links[0])
    return Engine(
        store=store,
        arenas=[arena for arena, _, _ in numbered],
        cache=cache,
        loop=WatchedLoop(
            links, arrivals, watchdog_seconds=system.watchdog_seconds, timeline=options.timeline
        ),
        driver=driver,
        host_compute=host_compute,
    )
