"""A policy core of several devices: each expert in one of them."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.config import SystemConfig
from runtime.policy.build import build_device_cache
from runtime.policy.counters import sum_counters
from runtime.policy.placement import NO_DEVICE, ExpertPlacement, place_experts
from runtime.presets import load_system
from tests.builders.traces import make_spec
from tests.unit.runtime.policy.test_device_cache import compute, drain

SPEC = make_spec(num_layers=3, num_experts=8, top_k=2)
ONE = np.array([0])
CHUNKS = [(10, 10, 20)] * SPEC.num_layers


def make_caches(num_devices, *, slots=(4,), **switches):
    system, sizes = SystemConfig(per_layer=False, **switches), [slots] * num_devices
    placed = ExpertPlacement(num_devices)
    return build_device_cache(system, SPEC, num_slots=sizes, chunk_bytes=CHUNKS, placement=placed)


@pytest.mark.parametrize("counts", [[60] * 5, [8, 8, 4]], ids=["even", "uneven"])
@pytest.mark.parametrize("num_devices", [1, 2, 3, 8])
def test_placement__divides_every_layer_evenly(num_devices, counts):
    placement, most = place_experts(counts, num_devices), max(counts)
    assert (placement == ExpertPlacement(num_devices)) == (min(counts) == most)
    for layer, count in enumerate(counts):
        owners = [placement.device((layer, e)) for e in range(most)]
        assert owners[count:] == [NO_DEVICE] * (most - count)
        held = [owners.count(device) for device in range(num_devices)]
        assert sum(held) == count
        assert max(held) - min(held) <= 1
        for device in range(num_devices):
            mask = placement.mask(layer, device, most).tolist()
            owned = placement.num_owned(device, num_layers=len(counts), num_experts=most)
            assert (mask, owned[layer]) == ([owner == device for owner in owners], held[device])


@given(
    seed=st.integers(0, 2**16),
    num_devices=st.integers(1, 4),
    slots=st.sampled_from([(4,), (5, 9)]),
    eviction=st.sampled_from(["lru", "lfu", "regret", "static", "moe-infinity-request", "reuse"]),
)
@settings(max_examples=60, deadline=None)
def test_devices__keeps_experts_on_their_device(seed, num_devices, slots, eviction):
    rng, placement, found = random.Random(seed), ExpertPlacement(num_devices), 0
    switches = {"eviction": eviction, "idle_prefetch": rng.random() < 0.5}
    core = make_caches(num_devices, slots=slots, **switches)
    for _ in range(6):
        core.begin_step(ONE)
        for layer in range(SPEC.num_layers):
            chance = [rng.random() for _ in range(8)]
            core.on_forecast(layer, chance, chance)
            core.on_reuse_scores(layer, np.array([[rng.random() for _ in range(8)]]))
            some = rng.sample(range(8), 3)
            core.prefetch(layer, some, [rng.random() for _ in some])
            drain(core)
            chosen = sorted(rng.sample(range(8), 3))
            found += len(set(some).intersection(chosen))
            order = core.request_routed(layer, dict.fromkeys(chosen, 1))
            assert sorted(order) == chosen
            compute(core, layer, order)
            for tier in core.tiers:
                for expert in tier.cache.entries:
                    assert placement.device(expert) == tier.device
                taken = {entry.slot for entry in tier.cache.entries.values()}
                assert len(taken) == len(tier.cache.entries) <= tier.cache.num_slots
        core.end_step()
    assert not any(tier.queue.requested for tier in core.tiers)
    drain(core)
    assert not any(entry.pins for tier in core.tiers for entry in tier.cache.entries.values())
    counters = sum_counters(core.counters)
    assert counters.requests == counters.predicted == 6 * SPEC.num_layers * 3
    assert counters.needed_predicted == found
    assert counters.hits + counters.joins + counters.misses == counters.requests
    assert sum(one.requests for one in core.counters) == counters.requests


def test_devices__orders_by_arrival_on_any_device():
    core = make_caches(2)
    core.begin_step(ONE)
    core.prefetch(0, [5, 2], [1.0, 0.0])
    drain(core)
    assert core.request_routed(0, dict.fromkeys([0, 2, 3, 5], 1)) == [2, 5, 0, 3]


def test_devices__makes_room_on_one_device_only():
    """One slot on each device: expert 0 waits for nothing that device 1 holds."""
    core = make_caches(2, slots=(1,), reordered=False)
    core.begin_step(ONE)
    pending = [0, 1, 2, 3]
    core.request_routed(0, dict.fromkeys(pending, 1))
    while pending:
        core.make_room(0, pending[0], pending)
        drain(core)
        assert core.is_ready((0, pending[0])), pending
        core.release((0, pending.pop(0)))
    assert sum_counters(core.counters).requests == 4


def test_devices__is_reset_in_every_tier():
    core = make_caches(2, slots=(2, 4))
    core.begin_step(ONE)
    core.request_routed(1, dict.fromkeys(range(6), 1))
    under_way = [tier.next_task() for tier in core.tiers]
    assert any(under_way)
    core.reset([() if task is None else (task.slot,) for task in under_way])
    for tier, task in zip(core.tiers, under_way, strict=True):
        assert all(not entry.pins for entry in tier.cache.entries.values())
        if task is not None:
            assert tier.cache.num_quarantined == 1
            tier.restore(task)
            assert tier.cache.num_quarantined == 0
    core.begin_step(ONE)
    compute(core, 1, core.request_routed(1, {0: 1, 1: 1}))


def test_devices__divides_a_static_set():
    counts = [[8 - e for e in range(8)]] * SPEC.num_layers
    options = {**load_system("static").eviction_options, "counts": counts}
    core = make_caches(2, slots=(7,), eviction="static", eviction_options=options)
    core.begin_step(ONE)
    for layer in range(SPEC.num_layers):
        for e in range(8):
            compute(core, layer, core.request_routed(layer, {e: 1}))
    for tier in core.tiers:
        stay = filter(tier.cache.policy.is_permanent, tier.cache.entries)
        assert [ExpertPlacement(2).device(e) for e in stay] == [tier.device] * 5


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("fills_top", [True, False])
def test_fill__in_topological_order_without_duplicates(num_devices, fills_top):
    core = make_caches(num_devices, slots=(5, 4), fill_first_layers=fills_top)
    core.fill()
    for device in range(num_devices):
        top, host = (sorted(tier.cache) for tier in core.tiers if tier.device == device)
        own = [(layer, e) for layer in range(SPEC.num_layers) for e in range(SPEC.num_experts)]
        own = [expert for expert in own if ExpertPlacement(num_devices).device(expert) == device]
        assert (top, host) == ((own[:5], own[5:9]) if fills_top else ([], own[:4]))
        assert all(core.is_ready(expert) for expert in top)


@pytest.mark.timeout(30)
def test_fill__of_a_large_model_takes_no_minute():
    spec = make_spec(num_layers=60, num_experts=512, top_k=10)
    num_slots = spec.num_layers * spec.num_experts
    system, chunks = SystemConfig(fill_first_layers=True), [(1,)] * spec.num_layers
    core = build_device_cache(system, spec, num_slots=[[num_slots]], chunk_bytes=chunks)
    assert len(core.first_experts(fills_top=True)[0]) == num_slots


def test_devices__early_requests_go_to_their_device():
    core = make_caches(2)
    core.begin_step(ONE)
    assert sorted(core.request_early(0, [0, 1, 2])) == [0, 1, 2]
    assert (core.request_early(0, [1]), sorted(core.requested_early(0))) == ([], [0, 1, 2])
    drain(core)
    assert sorted(core.request_routed(0, {0: 1, 1: 1})) == [0, 1]
    assert not core.requested_early(0)
    compute(core, 0, [0, 1])
    assert not any(entry.pins for tier in core.tiers for entry in tier.cache.entries.values())
