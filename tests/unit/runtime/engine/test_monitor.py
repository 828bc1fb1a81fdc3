"""What is asked of a running engine agrees with its books, whatever it is doing."""

import itertools
import threading
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from runtime.engine.monitor import ABSENT, BELOW, CACHED, COMING, PINNED, EngineMonitor
from runtime.errors import Fault, TransferError
from runtime.presets import load_system
from tests.builders.faults.workers import before_read
from tests.builders.patchable import use_patchable_core
from tests.builders.served import serving, settle


def generate(model, *, tokens: int = 6) -> None:
    model.generate(torch.arange(1, 8)[None], max_new_tokens=tokens, do_sample=False, pad_token_id=0)


def settled(monitor: EngineMonitor):
    """All cells and a snapshot of the same moment, with no transfer under way."""
    settle(monitor.engine)
    return "".join(monitor.cells()), monitor.snapshot()


@contextmanager
def watched(folder, **options):
    """A model that has generated, and its monitor."""
    with serving(folder, **options) as model:
        generate(model)
        yield model, EngineMonitor(model.moecast.engine)


def test_snapshot__is_what_the_report_says(folder):
    # On the computing thread: another one's time goes on.
    system = replace(load_system("moecast"), synchronous=True)
    with watched(folder, budget="50%", predictor="skip", system=system) as (model, monitor):
        text, snapshot = settled(monitor)
        report = model.moecast.stats()
    (tier,) = snapshot.tiers
    assert (tier.name, tier.computes) == ("host", True)
    total = snapshot.computing.as_dict()
    assert {key: report[key] for key in total} == total
    assert len(snapshot.computing_layers) == 3
    # The router before the first layer does not exist.
    found = [layer.needed_predicted for layer in snapshot.computing_layers]
    assert snapshot.computing_layers[0].recall is None
    assert min(found[1:]) > 0 == found[0]
    assert sum(layer.hits for layer in snapshot.computing_layers) == report["hits"]
    assert snapshot.stall_seconds == report["stall_seconds"]
    assert snapshot.predictor_seconds == report["predictor_seconds"] > 0
    assert snapshot.link_seconds["disk"] > 0
    assert (len(text), set(text) <= {ABSENT, CACHED}) == (36, True)
    assert text.count(CACHED) == tier.num_used <= tier.num_slots == 18
    assert tier.num_pinned == tier.num_in_flight == 0
    assert tier.used_bytes * tier.num_slots == tier.num_used * tier.budget_bytes
    assert (snapshot.faults, snapshot.num_lost_threads) == ({}, 0)
    assert snapshot.prefetching is not None  # the default system is adaptive


def test_cells__with_a_tier_below_tell_host_from_device(folder):
    with watched(folder, budget="25%", host_budget="100%") as (_, monitor):
        text, snapshot = settled(monitor)
    tiers = snapshot.tiers
    assert [(tier.name, tier.computes) for tier in tiers] == [("device", True), ("host", False)]
    assert text.count(CACHED) == 9
    assert text.count(BELOW) == tiers[1].num_used - 9 > 0
    assert tiers[1].total.requests > 0


def test_cells__show_computing_experts_as_pinned(folder, monkeypatch):
    use_patchable_core(monkeypatch)
    seen: list[str] = []
    with serving(folder, budget="50%") as model:
        engine, monitor = model.moecast.engine, EngineMonitor(model.moecast.engine)
        real = engine.cache.release

        def used(expert):
            layer, e = expert
            seen.append(monitor.cells()[layer][e])
            return real(expert)

        engine.cache.release = used
        generate(model, tokens=2)
        assert PINNED not in "".join(monitor.cells())
    assert set(seen) == {PINNED}


def test_faults__are_counted_for_unused_prefetches_too(folder):
    with serving(folder, budget="50%") as model:
        engine = model.moecast.engine
        failed = itertools.count()

        def cut_short() -> None:
            next(failed)
            raise TransferError("cut short", fault=Fault.TRUNCATED)

        with before_read(engine, 1, cut_short, times=1000), pytest.raises(TransferError):
            generate(model)
        generate(model)
        # Reads that were under way have failed too.
        _, snapshot = settled(EngineMonitor(engine))
        assert snapshot.faults == {"truncated": next(failed)}


def test_snapshot__while_a_model_generates_never_breaks_it(folder):
    with serving(folder, budget="25%", predictor="skip") as model:
        monitor, stop = EngineMonitor(model.moecast.engine), threading.Event()
        requests, wrong = [], []

        def look() -> None:
            while not stop.wait(0.001):
                snapshot = monitor.snapshot()
                requests.append(snapshot.computing.requests)
                for layer in snapshot.computing_layers:
                    if layer.hits + layer.joins + layer.misses != layer.requests:
                        wrong.append(layer)
                wrong.extend(row for row in monitor.cells() if len(row) != 12)

        looker = threading.Thread(target=look)
        looker.start()
        try:
            while len(requests) <= 3:
                generate(model, tokens=20)
        finally:
            stop.set()
            looker.join(240)
    assert not looker.is_alive()
    assert not wrong
    assert requests == sorted(requests)


def test_several_devices__are_distinguished_in_one_map(folder):
    options = {"devices": ["cpu", "cpu"], "budget": "50%", "host_budget": "100%"}
    with watched(folder, **options) as (model, monitor):
        text, snapshot = settled(monitor)
        requests = model.moecast.stats()["requests"]
    names = [(tier.name, tier.computes) for tier in snapshot.tiers]
    assert names == [("device0", True), ("host0", False), ("device1", True), ("host1", False)]
    assert snapshot.computing.requests == requests
    # A prefetch may wait for the tier below.
    num_used = sum(tier.num_used for tier in snapshot.tiers if tier.computes)
    assert text.count(CACHED) + text.count(COMING) == num_used
