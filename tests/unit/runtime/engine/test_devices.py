"""Several devices in one machine: an arena, a link and workers for each, and the same bits.

Here they are all the CPU; `tests/devices` has accelerators.
"""

import os
import re
import threading
import time

import pytest
import torch

from runtime.config import SystemConfig
from runtime.engine import assembly as assemble
from runtime.errors import BudgetError, CheckpointError, TransferError
from runtime.policy.placement import ExpertPlacement
from runtime.transfer.arena import find_near_cpus, run_near
from runtime.transfer.thread_ring import ThreadRing
from tests.builders.faults.workers import before_read, refuse
from tests.builders.models import GREEDY, TOKENS
from tests.builders.served import serve, serving, settle
from tests.builders.waiting import wait_for
from tests.unit.runtime.engine.test_serving import HAS_NAMES, TASKS, watch_readers

WHOLE = {"chunked": False, "early_preemption": False, "reordered": False}
SYSTEMS = {
    "promoe": {},
    "tiers": {},
    "on-demand": {"prefetch": False, **WHOLE},
    "in order": {"reordered": False, "per_layer": False},
    "filled": {"eviction": "regret", "idle_prefetch": True, "adaptive": True, "per_layer": False},
    "klotski": {"hot_first": True, "drop_used": True},
}


@pytest.mark.parametrize("name", SYSTEMS)
def test_devices__change_no_bit(folder, expected, name):
    system, host_budget = SystemConfig(**SYSTEMS[name]), "80%" if name == "tiers" else None
    num_devices = 3 if system.per_layer else 2
    options = {"budget": "40%", "host_budget": host_budget, "predictor": "skip", "system": system}
    model = serve(folder, devices=["cpu"] * num_devices, **options)
    engine, tiers = model.moecast.engine, ["copy", "disk"] if host_budget else ["disk"]
    with model.moecast, torch.no_grad():
        assert torch.equal(model(TOKENS).logits, expected[0])
        assert torch.equal(model.generate(TOKENS, **GREEDY), expected[1])
        stats, placement = model.moecast.stats(), ExpertPlacement(num_devices)
        settle(engine)
        for tier in engine.cache.tiers:
            assert all(placement.device(expert) == tier.device for expert in tier.cache)
            assert tier.cache.entries or system.drop_used
        assert all(link.busy_seconds > 0 for link in engine.loop.links)
    names = [f"{tier} {device}" for device in range(num_devices) for tier in tiers]
    assert [link.name for link in engine.loop.links] == names
    assert list(stats["lower_tiers"]) == (names[1::2] if host_budget else [])
    assert stats["requests"] == stats["hits"] + stats["joins"] + stats["misses"] > 0
    assert stats["arena_slots"] == sum(arena.num_slots for arena in engine.arenas[:: len(tiers)])


def test_devices__share_the_budget(folder):
    """Never more than one device would have, and all of it: less than a slot for each is left."""
    for budget, host_budget in (("40%", None), ("100%", None), ("30%", "70%")):
        alone = serve(folder, budget=budget, host_budget=host_budget)
        spread = serve(folder, budget=budget, host_budget=host_budget, devices="cpu, cpu,cpu")
        with alone.moecast, spread.moecast:
            one, several = alone.moecast.engine.arenas, spread.moecast.engine.arenas
            for tier in range(len(one)):
                size = one[tier].num_bytes // one[tier].num_slots
                total = sum(arena.num_bytes for arena in several[tier :: len(one)])
                assert one[tier].num_bytes - 3 * size < total <= one[tier].num_bytes
            if budget == "100%":
                assert sum(arena.num_slots for arena in several) == 3 * 12


def test_devices__a_slow_link_does_not_delay_the_other_devices(folder, expected, monkeypatch):
    """Experts of the other device are computed first, and every bit is as before."""
    order, connect, is_ordered = [], assemble.connect, threading.Event()

    def slowed(store, spec, devices, arrivals, options):
        first, [(arena, ring)] = devices

        def transfer(task):
            """Slower than the other device's: one of its experts has been computed."""
            while is_ordered.is_set() and not order:
                time.sleep(0.001)
            ring.transfer(task)

        second = [(arena, ThreadRing(arrivals, transfer, name="slow"))]
        return connect(store, spec, [first, second], arrivals, options)

    monkeypatch.setattr(assemble, "connect", slowed)
    options = {"devices": ["cpu", "cpu"], "system": SystemConfig(chunked=False)}
    with serving(folder, budget="40%", **options) as model, torch.no_grad():
        engine = model.moecast.engine
        assert torch.equal(model(TOKENS).logits, expected[0])
        wanted = list(range(6))
        engine.begin_step(TOKENS[0].numpy(), TOKENS[0].numpy() * 0 + 99)
        is_ordered.set()
        for batch in engine.ready(0, wanted):
            order.extend(batch)
        engine.end_step()
    assert sorted(order) == wanted
    assert order[0] % 2 == 0  # the first device's, whose link is fast


def test_devices__an_unreadable_expert_fails_its_request_only(folder, expected):
    with serving(folder, budget="40%", devices=["cpu", "cpu"]) as model, torch.no_grad():
        fails = pytest.raises(TransferError, match="injected")
        with before_read(model.moecast.engine, 5, refuse, times=1000), fails:
            model(TOKENS)
        assert torch.equal(model(TOKENS).logits, expected[0])


def test_devices__close_ends_every_ring_and_the_files_last(folder):
    own_readers, model = watch_readers(), serve(folder, budget="40%", devices=["cpu"] * 3)
    engine, order = model.moecast.engine, []
    close, rings = engine.store.close, [link.ring for link in engine.loop.links]
    engine.store.close = lambda: (order.append([r.running() for r in rings]), close())
    with torch.no_grad():
        model(TOKENS)
    assert own_readers() or not HAS_NAMES
    model.moecast.close()
    assert order == [[[], [], []]]
    # On a busy machine, a thread that has been ended is there for a moment.
    wait_for(lambda: not own_readers())


def test_load__devices_that_do_not_go_together_are_named(folder):
    with pytest.raises(CheckpointError, match="cpu, cuda, xpu, mps only"):
        serve(folder, devices=["cpu", "meta"])
    with pytest.raises(CheckpointError, match="write auto, cpu, cuda"):
        serve(folder, devices="cpu,gpu7")
    if not torch.cuda.is_available():
        with pytest.raises(CheckpointError, match="sees no CUDA device"):
            serve(folder, device="cuda")
    with pytest.raises(BudgetError, match=r"too small for 2 devices.*budget=(\d+)") as caught:
        serve(folder, devices="cpu,cpu", budget="1KiB")
    least = re.search(r"budget=(\d+)", str(caught.value))
    serve(folder, devices="cpu,cpu", budget=int(least[1])).moecast.close()
    with pytest.raises(BudgetError, match="host_budget of 1024 bytes is too small for 2 devices"):
        serve(folder, devices="cpu,cpu", host_budget="1KiB")
    with pytest.raises(BudgetError, match=r"^budget of 1024 bytes"):
        serve(folder, budget="1KiB", host_budget="50%")


# ---- nodes of memory


def make_nodes(folder, *cpulists):
    for number, cpus in enumerate(cpulists):
        node = folder / f"node{number}"
        node.mkdir(parents=True)
        (node / "cpulist").write_text(cpus + "\n")
    return folder


def test_numa__cpu_devices_take_the_nodes_in_turn(tmp_path, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 5}, raising=False)
    nodes, cpu = make_nodes(tmp_path / "nodes", "0-1", "", "2-3,5"), torch.device("cpu")
    found = [find_near_cpus(cpu, number, nodes=nodes) for number in range(3)]
    assert found == [{0, 1}, {2, 5}, {0, 1}]
    # Where there is one node, or none is known, nothing is near.
    assert find_near_cpus(cpu, 0, nodes=make_nodes(tmp_path / "one", "0-7")) is None
    assert find_near_cpus(cpu, 0, nodes=tmp_path / "none") is None


def test_numa__near_lasts_for_a_while():
    before = os.sched_getaffinity(0)
    one = frozenset([min(before)])
    with run_near(one):
        assert os.sched_getaffinity(0) == one
    assert os.sched_getaffinity(0) == before
    with run_near(None):
        assert os.sched_getaffinity(0) == before


def test_numa__readers_run_near_their_memory(folder, monkeypatch):
    cpus = sorted(os.sched_getaffinity(0))
    places = [frozenset(cpus[:1]), frozenset(cpus[-1:])]
    monkeypatch.setattr(assemble, "find_near_cpus", lambda _, number: places[number])
    before = {int(task.name) for task in TASKS.iterdir()}
    with serving(folder, budget="40%", devices=["cpu", "cpu"]) as model, torch.no_grad():
        model(TOKENS)
        threads = {int(task.name) for task in TASKS.iterdir()} - before
        assert set(places) <= {frozenset(os.sched_getaffinity(thread)) for thread in threads}
    assert os.sched_getaffinity(0) == set(cpus)
