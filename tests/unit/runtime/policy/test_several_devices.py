"""A policy core of several devices: each expert in one of them."""

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.config import SystemConfig
from runtime.policy.build import build_device_cache
from runtime.policy.counters import sum_counters
from runtime.policy.placement import ExpertPlacement
from tests.builders.traces import make_spec

SPEC = make_spec(num_layers=3, num_experts=8, top_k=2)
ONE = np.array([0])
CHUNKS = [(10, 10, 20)] * SPEC.num_layers


def make_caches(num_devices, *, slots=(4,), **switches):
    return build_device_cache(
        SystemConfig(**{"per_layer": False, **switches}),
        SPEC,
        num_slots=[slots] * num_devices,
        chunk_bytes=CHUNKS,
        placement=ExpertPlacement(num_devices),
    )


def drain(core):
    """Carries out all transfers; which expert went through which tier."""
    moved = []
    while True:
        tasks = [(i, tier, tier.next_task()) for i, tier in enumerate(core.tiers)]
        if not any(task for *_, task in tasks):
            return moved
        for i, tier, task in tasks:
            if task is not None:
                tier.complete(task)
                moved.append((i, task.expert))


@pytest.mark.parametrize("num_devices", [1, 2, 3, 8])
def test_placement__divides_every_layer_evenly(num_devices):
    placement = ExpertPlacement(num_devices)
    for layer in range(5):
        owners = [placement.device((layer, e)) for e in range(60)]
        by_device = Counter(owners)
        assert set(owners) == set(range(num_devices))
        assert max(by_device.values()) - min(by_device.values()) <= 1
        for device in range(num_devices):
            mask_E = placement.mask(layer, device, 60)
            assert mask_E.tolist() == [owner == device for owner in owners]
    owned = [sum(placement.num_owned(d, num_layers=5, num_experts=60)) for d in range(num_devices)]
    assert sum(owned) == 300


@given(
    seed=st.integers(0, 2**16),
    num_devices=st.integers(1, 4),
    eviction=st.sampled_from(["lru", "lfu", "regret", "static", "moe-infinity-request", "reuse"]),
)
@settings(max_examples=60, deadline=None)
def test_devices__keeps_experts_on_their_device(seed, num_devices, eviction):
    rng = random.Random(seed)
    core = make_caches(num_devices, eviction=eviction, idle_prefetch=rng.random() < 0.5)
    placement = ExpertPlacement(num_devices)
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
            order = core.request_routed(layer, dict.fromkeys(chosen, 1))
            assert sorted(order) == chosen
            while order:
                drain(core)
                ready = next(e for e in order if core.is_ready((layer, e)))
                entry = core.entry((layer, ready))
                assert entry is not None
                assert entry.pins == 1
                core.release((layer, ready))
                order.remove(ready)
            for tier in core.tiers:
                for expert in tier.cache.entries:
                    assert placement.device(expert) == tier.device
        core.end_step()
    counters = sum_counters(core.counters)
    assert counters.requests == 6 * SPEC.num_layers * 3
    assert counters.hits + counters.joins + counters.misses == counters.requests
    assert sum(one.requests for one in core.counters) == counters.requests


def test_devices__one_is_as_without_a_placement():
    """The same calls, the same transfers, the same counters, whatever the switches."""
    for switches in (
        {},
        {"chunked": False},
        {"early_preemption": False},
        {"reordered": False},
        {"hot_first": True, "drop_used": True},
        {"eviction": "moe-infinity-sequence", "cancel": True},
    ):
        system = SystemConfig(per_layer=False, **switches)
        one, other = (
            build_device_cache(
                system, SPEC, chunk_bytes=CHUNKS, num_slots=[(5,)], placement=placement
            )
            for placement in (None, ExpertPlacement())
        )
        rng = random.Random(3)
        for step in range(8):
            for core in (one, other):
                core.begin_step(np.array([step // 4]))
            for layer in range(SPEC.num_layers):
                score_E = [rng.random() for _ in range(8)]
                some, chosen = rng.sample(range(8), 3), sorted(rng.sample(range(8), 3))
                tokens = {e: rng.randint(1, 4) for e in chosen}
                orders, moves = [], []
                for core in (one, other):
                    core.on_forecast(layer, score_E, score_E)
                    core.prefetch(layer, some, [score_E[e] for e in some])
                    move = drain(core)
                    order = core.request_routed(layer, tokens)
                    orders.append(list(order))
                    for e in order:
                        core.request((layer, e))
                        move += drain(core)
                        assert core.is_ready((layer, e))
                        core.release((layer, e))
                    moves.append(move)
                assert orders[0] == orders[1], switches
                assert moves[0] == moves[1], switches
            for core in (one, other):
                core.end_step()
        assert sum_counters(one.counters) == sum_counters(other.counters), switches


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
    core.request_routed(0, dict.fromkeys([0, 1, 2, 3], 1))
    pending = [0, 1, 2, 3]
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
    order = core.request_routed(1, {0: 1, 1: 1})
    for e in order:
        drain(core)
        core.release((1, e))


def test_devices__divides_a_static_set():
    counts = [[8 - e for e in range(8)]] * SPEC.num_layers
    system = SystemConfig(eviction="static", eviction_options={"counts": counts}, per_layer=False)
    core = build_device_cache(
        system, SPEC, num_slots=[(7,), (7,)], chunk_bytes=CHUNKS, placement=ExpertPlacement(2)
    )
    core.begin_step(ONE)
    for layer in range(SPEC.num_layers):
        for e in range(8):
            core.request_routed(layer, {e: 1})
            drain(core)
            core.release((layer, e))
    for tier in core.tiers:
        stay = [e for e in tier.cache.entries if tier.cache.policy.is_permanent(e)]
        assert len(stay) == 5
        assert all(ExpertPlacement(2).device(e) == tier.device for e in stay)


def test_devices__fills_host_tiers_with_own_experts():
    core = make_caches(2, slots=(2, 5))
    core.fill()
    for tier in core.tiers:
        held = list(tier.cache)
        assert len(held) == (0 if tier.is_top else 5)
        assert all(ExpertPlacement(2).device(expert) == tier.device for expert in held)


@pytest.mark.parametrize("num_devices", [1, 2])
def test_fill__in_topological_order_without_duplicates(num_devices):
    core = make_caches(num_devices, slots=(5, 4), fill_first_layers=True)
    core.fill()
    for device in range(num_devices):
        top, host = (sorted(tier.cache) for tier in core.tiers if tier.device == device)
        own = [(layer, e) for layer in range(SPEC.num_layers) for e in range(SPEC.num_experts)]
        own = [expert for expert in own if ExpertPlacement(num_devices).device(expert) == device]
        assert (top, host) == (own[:5], own[5:9])
        assert all(core.is_ready(expert) for expert in top)


@pytest.mark.timeout(30)
def test_fill__of_a_large_model_takes_no_minute():
    spec = make_spec(num_layers=60, num_experts=512, top_k=10)
    num_slots = spec.num_layers * spec.num_experts
    core = build_device_cache(
        SystemConfig(fill_first_layers=True),
        spec,
        num_slots=[[num_slots]],
        chunk_bytes=[(1,)] * spec.num_layers,
    )
    assert len(core.first_experts(fills_top=True)[0]) == num_slots


def test_devices__early_requests_go_to_their_device():
    core = make_caches(2)
    core.begin_step(ONE)
    assert sorted(core.request_early(0, [0, 1, 2])) == [0, 1, 2]
    assert core.request_early(0, [1]) == []
    assert sorted(core.requested_early(0)) == [0, 1, 2]
    drain(core)
    assert sorted(core.request_routed(0, {0: 1, 1: 1})) == [0, 1]
    assert not core.requested_early(0)
    core.release((0, 0))
    core.release((0, 1))
    assert not any(entry.pins for tier in core.tiers for entry in tier.cache.entries.values())
