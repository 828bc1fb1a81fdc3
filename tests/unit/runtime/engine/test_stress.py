"""Eight threads over one engine whose arena holds a few experts: within budget, no byte wrong."""

import itertools
import random
import sys
import threading
from collections import Counter

import numpy as np
import pytest
import torch

from runtime.errors import TransferError
from tests.builders.models import plain_eager, tiny_qwen2_moe
from tests.builders.patchable import use_patchable_core
from tests.builders.served import serve

LAYERS, EXPERTS = 4, 8
STEPS = 50
"""Of each of the two threads that compute: 400 layers in all."""
TRANSITIONS = (
    *("request", "release", "prefetch", "cancel_prefetches"),
    *("next_task", "complete", "fail"),
)


@pytest.fixture
def frantic():
    """The interpreter changes threads as often as it can."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


def check_after_every_transition(engine, counts):
    """A slot is one expert's, in flight or not; all of them are within what was allocated."""

    def checked(tier, arena, name):
        real = getattr(tier, name)

        def transition(*args, **kwargs):
            result = real(*args, **kwargs)
            slots = [entry.slot for entry in tier.cache.entries.values()]
            assert len(slots) == len(set(slots)) <= arena.num_slots, (name, slots)
            assert all(0 <= slot < arena.num_slots for slot in slots), (name, slots)
            assert len(slots) * (arena.num_bytes // arena.num_slots) <= arena.num_bytes
            counts[name] += 1
            return result

        setattr(tier, name, transition)

    for tier, arena in zip(engine.cache.tiers, engine.arenas, strict=True):
        for name in TRANSITIONS:
            checked(tier, arena, name)


def disturb_reads(engine):
    """Every 97th read is refused; a slot never has two readers."""
    real, numbers = engine.store.read, itertools.count(1)
    lock, writing = threading.Lock(), set()

    def read(layer, expert, chunks, slot):
        if next(numbers) % 97 == 0:
            raise TransferError("injected")
        place = slot.data_ptr()
        with lock:
            assert place not in writing, "two reads write into one slot"
            writing.add(place)
        try:
            real(layer, expert, chunks, slot)
        finally:
            with lock:
                writing.remove(place)

    engine.store.read = read


def compute(engine, banks, seed, counts):
    """Steps as a model takes them; some end early or request experts that were not forecast."""
    chance = random.Random(seed)
    for step in range(STEPS):
        engine.begin_step(np.array([1]), np.array([seed * STEPS + step]))
        try:
            for layer in range(LAYERS):
                wanted = sorted(chance.sample(range(EXPERTS), chance.randint(1, 5)))
                engine.routed(layer, np.array([wanted]), None, None)
                action = chance.random()
                if action < 0.05:
                    continue  # requested and never computed
                if action < 0.1:
                    wanted = sorted(chance.sample(range(EXPERTS), 2))
                experts = engine.ready(layer, wanted)
                for expert, weights in experts:
                    assert torch.equal(weights["gate_up_proj"], banks[layer].gate_up_proj[expert])
                    assert torch.equal(weights["down_proj"], banks[layer].down_proj[expert])
                    counts["computed"] += 1
                    if action > 0.97:
                        break  # the pass ends in an exception
                experts.close()
        except TransferError:
            counts["refused"] += 1
        finally:
            engine.end_step()


def forecast(engine, seed, counts, over):
    """Predicts and cancels without end."""
    chance = random.Random(seed)
    while not over.is_set():
        layer = chance.randrange(LAYERS)
        with engine._condition:
            if chance.random() < 0.4:
                engine.cache.top.cancel_prefetches(layer)
                counts["cancelled"] += 1
            else:
                experts = chance.sample(range(EXPERTS), 4)
                engine.cache.prefetch(layer, experts, [chance.random() for _ in experts])
                counts["predicted"] += 1
            engine._condition.notify_all()
        if chance.random() < 0.1:
            over.wait(0.0005)


@pytest.mark.usefixtures("frantic")
@pytest.mark.parametrize("host_budget", [None, "40%"])
def test_engine__eight_threads_cancel_evict_and_prefetch(tmp_path, monkeypatch, host_budget):
    use_patchable_core(monkeypatch)
    folder = tiny_qwen2_moe(tmp_path / "model", num_layers=LAYERS, num_experts=EXPERTS)
    banks = [layer.mlp.experts for layer in plain_eager(folder).model.layers]
    model = serve(folder, budget="25%", host_budget=host_budget)
    engine, counts, over, failures = model.moecast.engine, Counter(), threading.Event(), []
    check_after_every_transition(engine, counts)
    disturb_reads(engine)

    def guarded(work, *args):
        try:
            work(*args)
        except BaseException as error:
            failures.append(error)
            over.set()
            raise

    computing = [
        threading.Thread(target=guarded, args=(compute, engine, banks, seed, counts), daemon=True)
        for seed in range(2)
    ]
    forecasting = [
        threading.Thread(target=guarded, args=(forecast, engine, seed, counts, over), daemon=True)
        for seed in range(2, 8)
    ]
    with model.moecast:
        for thread in computing + forecasting:
            thread.start()
        for thread in computing:
            thread.join()
        over.set()
        for thread in forecasting:
            thread.join()
        stats = model.moecast.stats()
        with engine._condition:
            for tier in engine.cache.tiers:
                for layer in range(LAYERS):
                    tier.cancel_prefetches(layer)
        top = engine.cache.top
        assert not any(top.is_requested((x, e)) for x in range(LAYERS) for e in range(EXPERTS))
    assert not failures
    assert stats["lost_threads"] == 0
    # How much the threads forecast besides depends on the machine.
    assert stats["evictions"] > 100
    for name in ("cancelled", "predicted", "request", "complete"):
        assert counts[name] > 100, counts
    assert counts["computed"] > 500
    assert counts["fail"] > 0
