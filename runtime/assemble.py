"""Arenas, links, policy core and workers for one model."""

from collections.abc import Sequence

import psutil
import torch

from predictors.base import Predictor
from predictors.spec import ModelSpec
from runtime.budget import parse_budget, slots_of
from runtime.config import SystemConfig
from runtime.driver import PredictorDriver
from runtime.engine import Engine
from runtime.keeper import Keeper
from runtime.policy.build import build_planner, build_prefetcher, on_link
from runtime.store.base import Store, decoded_bytes, slot_bytes
from runtime.tiers.arena import Arena
from runtime.tiers.cuda import CudaLink
from runtime.tiers.link import HostLink, Link, StoreLink
from runtime.tiers.worker import Shared, Worker
from runtime.timeline import Timeline

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


def host_slots(size: int, spec: ModelSpec, *, budget: str | int | None, scratch_bytes: int) -> int:
    """Slots of the host tier below a device: all experts, or what free memory allows."""
    if budget is None:
        total = spec.num_layers * spec.num_experts * size + scratch_bytes
        budget = min(total, int(HOST_SHARE * psutil.virtual_memory().available))
    return arena_slots(size, spec, budget=budget, scratch_bytes=scratch_bytes, name="host_budget")


def build_engine(
    store: Store,
    spec: ModelSpec,
    *,
    system: SystemConfig,
    predictor: Predictor | None,
    budget: str | int,
    host_budget: str | int | None = None,
    device: torch.device | str = "cpu",
    timeline: Timeline | None = None,
    keeper: Predictor | None = None,
) -> Engine:
    """An engine that serves the store's experts from `budget` bytes on the device.

    On the CPU there is one tier, unless `host_budget` asks for another below it: then experts are
    copied from arena to arena, as they would be to a device.
    """
    device = torch.device(device)
    size, scratch_bytes, decoded = slot_bytes(store), store.scratch_bytes, decoded_bytes(store)
    is_cuda = device.type == "cuda"
    if is_cuda or host_budget is not None:
        upper = arena_slots(size, spec, budget=budget, scratch_bytes=decoded)
        lower = host_slots(size, spec, budget=host_budget, scratch_bytes=scratch_bytes)
        arenas = [
            Arena(store.layouts, upper, device=device),
            Arena(store.layouts, lower, pinned=is_cuda),
        ]
        copy: Link = (
            CudaLink(arenas[1], arenas[0], device) if is_cuda else HostLink(arenas[1], arenas[0])
        )
        links = [copy, StoreLink(store, arenas[1])]
    else:
        slots = arena_slots(size, spec, budget=budget, scratch_bytes=scratch_bytes + decoded)
        arenas = [Arena(store.layouts, slots)]
        links = [StoreLink(store, arenas[0])]
    return connect(
        store,
        spec,
        system=system,
        predictor=predictor,
        arenas=arenas,
        links=links,
        timeline=timeline,
        keeper=keeper,
    )


def connect(
    store: Store,
    spec: ModelSpec,
    *,
    system: SystemConfig,
    predictor: Predictor | None,
    arenas: Sequence[Arena],
    links: Sequence[Link],
    timeline: Timeline | None = None,
    keeper: Predictor | None = None,
) -> Engine:
    """An engine over arenas and the links that fill them, the computing tier first."""
    system = on_link(system, slows_computing=not isinstance(links[0], CudaLink))
    prefetcher = build_prefetcher(
        system,
        spec,
        num_slots=[arena.num_slots for arena in arenas],
        chunk_bytes=[layout.chunk_bytes for layout in store.layouts],
    )
    planner = build_planner(system, spec, prefetcher)
    shared = Shared(timeline, planner.governor)
    workers = [
        Worker(
            tier,
            link,
            shared,
            "disk" if tier.below is None else "copy",
            STORE_THREADS if tier.below is None else COPY_THREADS,
        )
        for tier, link in zip(prefetcher.tiers, links, strict=True)
    ]
    return Engine(
        store=store,
        arenas=arenas,
        prefetcher=prefetcher,
        workers=workers,
        shared=shared,
        driver=PredictorDriver(
            predictor if system.prefetch else None,
            planner,
            shared,
            None if keeper is None else Keeper(keeper, prefetcher, shared),
        ),
        watchdog_seconds=system.watchdog_seconds,
    )
