"""Arenas, links, policy core and workers for one model."""

from collections.abc import Sequence
from dataclasses import replace

import psutil
import torch

from predictors.base import Predictor
from predictors.spec import ModelSpec
from runtime.budget import parse_budget, slots_of, spread_slots
from runtime.config import SystemConfig
from runtime.engine.driver import PredictorDriver
from runtime.engine.engine import Engine
from runtime.engine.reuse_predictor import ReusePredictor
from runtime.engine.timeline import Timeline
from runtime.policy.build import (
    build_prefetcher,
    build_scheduler,
    build_shard,
    build_shards,
    on_link,
)
from runtime.policy.placement import Part, Placement
from runtime.policy.prefetcher import Prefetcher
from runtime.store.base import Store, decoded_bytes, slot_bytes
from runtime.transfer.arena import Arena
from runtime.transfer.cuda import CudaLink
from runtime.transfer.link import HostLink, Link, StoreLink
from runtime.transfer.numa import cpus_near, near
from runtime.transfer.worker import Shared, Worker

HOST_SHARE = 0.75
"""Of the memory that is free, what a host arena takes unless told: the rest is the user's."""
STORE_THREADS = 1
"""The computation reads too while it waits, and one or two readers fill a disk."""
COPY_THREADS = 2
"""One copy is queued behind the one under way, so that the device's link never idles."""


def arena_slots(
    size: int, spec: ModelSpec, *, budget: str | int, scratch_bytes: int, name: str = "budget"
) -> int:
    """Slots of `size` bytes that the budget buys."""
    num_experts = spec.num_layers * spec.num_experts
    # 100 % means that every expert fits, so the conversion buffer is added to what a share is of.
    total = num_experts * size + scratch_bytes
    return slots_of(
        parse_budget(budget, total_bytes=total),
        slot_bytes=size,
        scratch_bytes=scratch_bytes,
        top_k=spec.top_k,
        num_experts=num_experts,
        name=name,
    )


def device_slots(
    size: int,
    spec: ModelSpec,
    placement: Placement,
    *,
    budget: str | int,
    scratch_bytes: int,
    name: str = "budget",
) -> list[int]:
    """Slots of each device; the budget is that of all of them together."""
    if placement.num_devices == 1:
        return [arena_slots(size, spec, budget=budget, scratch_bytes=scratch_bytes, name=name)]
    shape = {"num_layers": spec.num_layers, "num_experts": spec.num_experts}
    owned = [placement.num_owned(device, **shape) for device in range(placement.num_devices)]
    return spread_slots(
        parse_budget(budget, total_bytes=sum(owned) * size + scratch_bytes),
        slot_bytes=size,
        scratch_bytes=scratch_bytes,
        top_k=spec.top_k,
        owned=owned,
        name=name,
    )


def host_budget_of(
    size: int, spec: ModelSpec, *, budget: str | int | None, scratch_bytes: int
) -> str | int:
    """The host tier below a device: as told, or all experts, or what free memory allows."""
    if budget is not None:
        return budget
    total = spec.num_layers * spec.num_experts * size + scratch_bytes
    return min(total, int(HOST_SHARE * psutil.virtual_memory().available))


def build_engine(
    store: Store,
    spec: ModelSpec,
    *,
    system: SystemConfig,
    predictor: Predictor | None,
    budget: str | int,
    host_budget: str | int | None = None,
    device: torch.device | str = "cpu",
    devices: Sequence[torch.device] = (),
    part: Part | None = None,
    timeline: Timeline | None = None,
    reuse_predictor: Predictor | None = None,
) -> Engine:
    """An engine that serves the store's experts from `budget` bytes on the device, or on all of
    `devices` together, each with an arena, a link and workers of its own; of a `part`, its experts
    only, of which a budget in percent is a share.

    On the CPU there is one tier, unless `host_budget` asks for another below it: then experts are
    copied from arena to arena, as they would be to a device.
    """
    places = list(devices) or [torch.device(device)]
    placement = Placement(len(places))
    sized = spec if part is None else replace(spec, num_experts=part.blocks.num_local)
    size, scratch_bytes, decoded = slot_bytes(store), store.scratch_bytes, decoded_bytes(store)
    has_host = places[0].type == "cuda" or host_budget is not None
    top = device_slots(
        size,
        sized,
        placement,
        budget=budget,
        scratch_bytes=decoded if has_host else scratch_bytes + decoded,
    )
    below: list[int | None] = [None] * len(places)
    if has_host:
        of_host = host_budget_of(size, sized, budget=host_budget, scratch_bytes=scratch_bytes)
        below = [
            *device_slots(
                size,
                sized,
                placement,
                budget=of_host,
                scratch_bytes=scratch_bytes,
                name="host_budget",
            )
        ]
    arenas: list[Arena] = []
    links: list[Link] = []
    near_by = [cpus_near(place, number) for number, place in enumerate(places)]
    for number, place in enumerate(places):
        with near(near_by[number]):
            made = tiers_of(
                store, place, top[number], below[number], closes=number == len(places) - 1
            )
        for arena, link in made:
            arenas.append(arena)
            links.append(link)
    return connect(
        store,
        spec,
        system=system,
        predictor=predictor,
        arenas=arenas,
        links=links,
        timeline=timeline,
        reuse_predictor=reuse_predictor,
        near_by=near_by,
        part=part,
    )


def tiers_of(
    store: Store, device: torch.device, slots: int, below: int | None, *, closes: bool
) -> list[tuple[Arena, Link]]:
    """One device's arenas and what fills them, the computing one first."""
    if below is None:
        arena = Arena(store.layouts, slots)
        return [(arena, StoreLink(store, arena, closes=closes))]
    is_cuda = device.type == "cuda"
    arena = Arena(store.layouts, slots, device=device)
    host = Arena(store.layouts, below, pinned=is_cuda)
    copy: Link = CudaLink(host, arena, device) if is_cuda else HostLink(host, arena)
    return [(arena, copy), (host, StoreLink(store, host, closes=closes))]


def connect(
    store: Store,
    spec: ModelSpec,
    *,
    system: SystemConfig,
    predictor: Predictor | None,
    arenas: Sequence[Arena],
    links: Sequence[Link],
    timeline: Timeline | None = None,
    reuse_predictor: Predictor | None = None,
    near_by: Sequence[frozenset[int] | None] = (None,),
    part: Part | None = None,
) -> Engine:
    """An engine over arenas and the links that fill them, the computing tier first.

    Args:
        near_by: processors near each device; the arenas and links are those of the first device,
            then as many of the next.
        part: the experts that are asked for here, of a model on one device; None: all.
    """
    system = on_link(system, slows_computing=not isinstance(links[0], CudaLink))
    num_devices = len(near_by)
    each = len(arenas) // num_devices
    num_slots = [arena.num_slots for arena in arenas]
    chunk_bytes = [layout.chunk_bytes for layout in store.layouts]
    prefetcher: Prefetcher
    if num_devices > 1:
        by_device = [num_slots[i : i + each] for i in range(0, len(num_slots), each)]
        prefetcher = build_shards(system, spec, num_slots=by_device, chunk_bytes=chunk_bytes)
    elif part is not None:
        prefetcher = build_shard(
            system, spec, part.blocks, part.rank, num_slots=num_slots, chunk_bytes=chunk_bytes
        )
    else:
        prefetcher = build_prefetcher(system, spec, num_slots=num_slots, chunk_bytes=chunk_bytes)
    scheduler = build_scheduler(system, spec, prefetcher)
    shared = Shared(timeline, scheduler.adaptive_prefetch)
    workers = [
        Worker(
            tier,
            link,
            shared,
            ("disk" if tier.below is None else "copy")
            + (f" {number // each}" if num_devices > 1 else ""),
            STORE_THREADS if tier.below is None else COPY_THREADS,
            cpus=near_by[number // each],
        )
        for number, (tier, link) in enumerate(zip(prefetcher.tiers, links, strict=True))
    ]
    return Engine(
        store=store,
        arenas=arenas,
        prefetcher=prefetcher,
        workers=workers,
        shared=shared,
        driver=PredictorDriver(
            predictor if system.prefetch else None,
            scheduler,
            shared,
            None
            if reuse_predictor is None
            else ReusePredictor(reuse_predictor, prefetcher, shared),
        ),
        watchdog_seconds=system.watchdog_seconds,
        placement=Placement(num_devices),
    )
