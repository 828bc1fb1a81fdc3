"""Whatever the order in which transfers end, the books hold and every byte is right."""

import itertools
import random
from collections import Counter

import numpy as np
import pytest
import torch

from runtime.config import SystemConfig
from runtime.errors import TransferError
from runtime.transfer.watched_loop import WatchedLoop
from tests.builders.models import plain_eager
from tests.builders.served import count_pins, serve_with_rings, serving, settle
from tests.builders.shuffled_ring import ShuffledRing

LAYERS, EXPERTS, STEPS = 3, 12, 40


@pytest.fixture(scope="module")
def banks(folder):
    return [layer.mlp.experts for layer in plain_eager(folder).model.layers]


def check_books(engine):
    """Every slot is free, one expert's, or set aside; what is in flight is in the ring."""
    for link, arena in zip(engine.loop.links, engine.arenas, strict=True):
        tier = link.tier
        slots = [entry.slot for entry in tier.cache.entries.values()]
        assert len(set(slots)) == len(slots) <= arena.num_slots
        in_flight = {expert for expert, entry in tier.cache.entries.items() if entry.in_flight}
        running, lost = engine.loop._running.items(), engine.loop._lost
        tasks = [task for t, (other, task) in running if other is link and t not in lost]
        assert not set(slots) & engine.loop.lost_slots(link)
        assert len(engine.loop.lost_slots(link)) == tier.cache.num_quarantined
        assert in_flight == {task.expert for task in tasks}
        assert all(tier.cache.entries[task.expert].slot == task.slot for task in tasks)
        assert {task.expert for task in tasks if not task.high} == set(link.prefetches)
        assert link.prefetched_bytes == sum(task.num_bytes for task in tasks if not task.high)
        assert tier.num_ready == sum(tier.is_ready(expert) for expert in tier.cache.entries)


def compute(engine, layer, wanted, banks):
    """Compares every expert with its weights, and returns those that were given."""
    given = []
    for batch in engine.ready(layer, wanted):
        for expert, weights in batch.items():
            assert torch.equal(weights["gate_up_proj"], banks[layer].gate_up_proj[expert])
            assert torch.equal(weights["down_proj"], banks[layer].down_proj[expert])
            check_books(engine)
            given.append(expert)
    return given


RUNS = {
    "promoe": (SystemConfig(), None, 0, False),
    "tiers": (SystemConfig(), "40%", 17, False),
    "in order": (SystemConfig(reordered=False, per_layer=False), None, 23, False),
    "klotski": (SystemConfig(drop_used=True, per_layer=False, cancel=True), "60%", 0, False),
    "whole": (SystemConfig(chunked=False, early_preemption=False), None, 11, False),
    "hangs": (SystemConfig(), "60%", 13, True),
}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", RUNS)
def test_loop__any_order_of_arrivals_gives_every_byte(folder, banks, monkeypatch, seed, name):
    system, host_budget, fails, hangs = RUNS[name]
    chance, counts = random.Random(seed), Counter()

    def shuffled(_name, arrivals, ring):
        return ShuffledRing(arrivals, ring, seed, fails=fails, hangs=hangs)

    options = {"budget": "25%", "host_budget": host_budget, "system": system}
    model = serve_with_rings(folder, monkeypatch, shuffled, **options)
    engine = model.moecast.engine
    rings = [link.ring for link in engine.loop.links]
    with model.moecast:
        for step in range(STEPS):
            engine.begin_step(np.array([1]), np.array([step // 10]))
            try:
                for layer in range(LAYERS):
                    if chance.random() < 0.7:
                        ahead = min(LAYERS - 1, layer + chance.randint(0, 2))
                        named = chance.sample(range(EXPERTS), 3)
                        engine.cache.prefetch(ahead, named, [chance.random() for _ in named])
                        engine.pump()
                        check_books(engine)
                    wanted = sorted(chance.sample(range(EXPERTS), chance.randint(1, 5)))
                    engine.routed(layer, np.array([wanted]), None, None)
                    check_books(engine)
                    if hangs and chance.random() < 0.3:
                        engine.loop.check_hung()
                        check_books(engine)
                    if chance.random() < 0.05:
                        continue  # requested and never computed
                    if chance.random() < 0.05:
                        wanted = sorted(chance.sample(range(EXPERTS), 2))  # the block chose others
                    assert sorted(compute(engine, layer, wanted, banks)) == wanted
                    counts["computed"] += len(wanted)
            except TransferError:
                counts["refused"] += 1
            finally:
                engine.end_step()
            check_books(engine)
        while engine.move_when_idle():
            engine.loop.wait()
        check_books(engine)
        assert count_pins(engine) == 0
    assert counts["computed"] > STEPS * LAYERS
    assert (counts["refused"] > 0) == (fails > 0)
    assert sum(ring.num_ended for ring in rings) > 100
    assert all(ring.num_cancelled > 0 for ring in rings[-1:] if ring.num_threads == 1)


@pytest.mark.parametrize(("pause", "held"), [(1e-3, 2), (3e-3, 3), (1.0, 10)])
def test_loop__holds_more_prefetches_where_events_are_far_apart(folder, monkeypatch, pause, held):
    """A link of 2 ms for an expert: at least 4 ms ahead, else twice the pause, at most 20 ms."""
    clock = itertools.count()
    monkeypatch.setattr(WatchedLoop, "_read_clock", lambda _: pause * next(clock))
    monkeypatch.setattr(ShuffledRing, "poll", lambda _: None)

    def shuffled(_name, arrivals, ring):
        return ShuffledRing(arrivals, ring, 0)

    system = SystemConfig(per_layer=False, idle_prefetch=False)
    model = serve_with_rings(folder, monkeypatch, shuffled, budget="75%", system=system)
    with model.moecast:
        engine = model.moecast.engine
        (link,) = engine.loop.links
        engine.begin_step(np.array([1]), np.array([0]))
        engine.cache.prefetch(1, range(EXPERTS), np.linspace(1, 0.5, EXPERTS).tolist())
        link.bytes_per_second = engine.arenas[0].num_bytes / engine.arenas[0].num_slots / 2e-3
        engine.pump()
        assert len(link.prefetches) == held
        engine.end_step()


def test_routed__finds_what_has_arrived_since_the_last_event(folder):
    system = SystemConfig(chunked=False, idle_prefetch=False)
    with serving(folder, budget="75%", system=system) as model:
        engine = model.moecast.engine
        engine.begin_step(np.array([1]), np.array([0]))
        engine.cache.prefetch(1, [3], [1.0])
        engine.pump()
        engine.loop.wait()  # during attention: no event
        engine.routed(1, np.array([[3]]), None, None)
        engine.end_step()
        stats = model.moecast.stats()
        assert (stats["hits"], stats["requests"]) == (1, 1)


def test_pin__an_expert_that_arrived_after_its_request_was_cancelled(folder):
    """A loop in a fixed order gives up requests to make room, and a transfer under way goes on."""
    with serving(folder, budget="50%") as model:
        engine, token = model.moecast.engine, np.zeros(1, np.int64)
        engine.begin_step(token, token)
        engine.routed(0, np.array([[0, 1]]), None, None)
        engine.pin(0, 0)
        settle(engine)
        assert engine.cache.is_ready((0, 1))
        engine.cache.cancel(0, [1])
        assert engine.cache.entry((0, 1)).pins == 0
        engine.pin(0, 1)
        assert engine.cache.entry((0, 1)).pins == 1
        engine.end_step()
        assert not any(entry.pins for entry in engine.cache.top.cache.entries.values())
