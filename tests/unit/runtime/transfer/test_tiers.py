"""Exact whatever the links do: reads that fail while they are joined, reads that hang."""

import itertools
import threading
import time
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from predictors.baselines import PopularityPredictor
from runtime.config import SystemConfig
from runtime.errors import TransferError
from runtime.transfer import watched_loop
from tests.builders.held_ring import HeldRing
from tests.builders.models import GREEDY, TOKENS, plain_eager, tiny_qwen2_moe
from tests.builders.predictors import small_spec
from tests.builders.served import serve_with_rings, serve_with_transfers, settle


@contextmanager
def serving_hanging(folder, monkeypatch, *, when, num, budget, watchdog_seconds):
    """The model, whose reads from the `when`-th on hang, so many of them, and the event that lets
    them go: they write rubbish then."""
    let_go, numbers = threading.Event(), itertools.count(1)

    def wrap(_name, transfer):
        def hang(task):
            if when <= next(numbers) < when + num and not let_go.is_set():
                assert let_go.wait(240)
                transfer.__self__._arena.slot(task.slot).fill_(0x7F)
            else:
                transfer(task)

        return hang

    system = SystemConfig(watchdog_seconds=watchdog_seconds)
    model = serve_with_transfers(folder, monkeypatch, wrap, budget=budget, system=system)
    try:
        yield model, let_go
    finally:
        let_go.set()
        model.close()


@pytest.mark.parametrize("when", [1, 4])
def test_watchdog__sets_the_slot_of_a_hanging_transfer_aside(folder, expected, monkeypatch, when):
    options = {"when": when, "num": 1, "budget": "20%", "watchdog_seconds": 1.0}
    with serving_hanging(folder, monkeypatch, **options) as (model, let_go):
        engine = model.moecast.engine
        assert torch.equal(model.generate(TOKENS, **GREEDY), expected[1])
        assert engine.report()["lost_threads"] == engine.cache.top.cache.num_quarantined == 1
        let_go.set()
        while engine.report()["lost_threads"]:
            assert torch.equal(model.generate(TOKENS, **GREEDY), expected[1])
        assert engine.cache.top.cache.num_quarantined == 0


def test_watchdog__a_dead_disk_is_an_error_until_it_answers(folder, expected, monkeypatch):
    options = {"when": 1, "num": 1000, "budget": "60%", "watchdog_seconds": 0.2}
    with serving_hanging(folder, monkeypatch, **options) as (model, let_go):
        for _ in range(2):
            with pytest.raises(TransferError, match="reads of experts have hung.*check the disk"):
                model.generate(TOKENS, **GREEDY)
        let_go.set()
        while model.moecast.stats()["lost_threads"]:
            time.sleep(0.01)
        assert torch.equal(model.generate(TOKENS, **GREEDY), expected[1])


def test_watchdog__after_an_idle_time_a_thread_reads_on_beside_those_that_hang(
    folder, expected, monkeypatch
):
    now = 0.0
    clock = SimpleNamespace(monotonic=lambda: now, perf_counter=time.perf_counter)
    monkeypatch.setattr(watched_loop, "time", clock)

    def held(_name, *ring):
        return HeldRing(*ring, num_held=watched_loop.MAX_LOST)

    system = SystemConfig(prefetch=False, watchdog_seconds=0.01)
    model = serve_with_rings(folder, monkeypatch, held, budget="60%", system=system)
    with model.moecast as handle:
        assert torch.equal(model.generate(TOKENS, **GREEDY), expected[1])
        settle(handle.engine)
        assert len(handle.engine.loop.links[0].ring.replaced) == watched_loop.MAX_LOST - 1
        assert handle.stats()["lost_threads"] == watched_loop.MAX_LOST
        now = 3600.0
        assert torch.equal(model.generate(TOKENS, **GREEDY), expected[1])


@pytest.mark.parametrize("host_budget", [None, "60%"])
@pytest.mark.parametrize("for_ever", [False, True])
def test_joined_read__that_fails_is_tried_once_more(tmp_path, monkeypatch, for_ever, host_budget):
    """An expert is requested while an earlier read of it is in flight, and that read fails."""
    folder = tiny_qwen2_moe(tmp_path / "model", num_layers=3, num_experts=8)
    tokens = torch.arange(64)[None]  # enough that every expert of every layer is requested
    expected = plain_eager(folder)(tokens).logits
    spec = small_spec(num_layers=3, num_experts=8, hidden_size=32)
    asked = threading.Event()
    broken: set = set()

    def breaking(name, read):
        def transfer(task):
            if name == "disk":
                if not broken and not task.high:
                    broken.add(task.expert)
                    assert asked.wait(240)
                    raise TransferError(f"{task.expert} is broken")
                if for_ever and task.expert in broken:
                    raise TransferError(f"{task.expert} is broken")
            read(task)

        return transfer

    predictor = PopularityPredictor(spec, np.random.default_rng(0).random((3, 8)))
    options = {"budget": "40%", "host_budget": host_budget, "predictor": predictor}
    model = serve_with_transfers(folder, monkeypatch, breaking, **options)
    engine = model.moecast.engine
    wait = engine.loop.wait

    def waiting():
        if any(engine.cache.top.is_requested(expert) for expert in broken):
            asked.set()
        wait()

    monkeypatch.setattr(engine.loop, "wait", waiting)
    ends = pytest.raises(TransferError, match="is broken") if for_ever else nullcontext()
    with model.moecast, torch.no_grad():
        with ends:
            # On a busy machine its prefetch may begin only when its layer has been computed.
            while not asked.is_set():
                assert torch.equal(model(tokens).logits, expected)
        assert len(broken) == 1
