"""Several devices in one machine: an arena, a link and workers for each, and the same bits.

Here they are all the CPU; `tests/devices` has accelerators.
"""

import os
import re
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from runtime.config import SystemConfig
from runtime.engine import assembly as assemble
from runtime.errors import BudgetError, CheckpointError, TransferError
from runtime.generation.lockstep.group import LockstepGroup
from runtime.hf.adapters.base import LayerExperts
from runtime.policy.placement import ExpertPlacement
from runtime.transfer.numa import find_near_cpus, parse_cpu_list, run_near
from runtime.transfer.thread_ring import ThreadRing
from tests.builders.models import plain_eager
from tests.builders.patchable import use_patchable_core
from tests.builders.served import count_pins, read_in_python, serve, settle
from tests.builders.waiting import wait_for

TOKENS = torch.randint(0, 64, (2, 7), generator=torch.Generator().manual_seed(3))
GREEDY = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}


@pytest.fixture(scope="module")
def expected(folder):
    plain = plain_eager(folder)
    with torch.no_grad():
        return plain(TOKENS).logits, plain.generate(TOKENS, **GREEDY)


def held_where_they_belong(engine) -> list[int]:
    """How many experts each device's tiers hold; fails where one holds another's."""
    tops = [tier for tier in engine.cache.tiers if tier.is_top]
    placement = ExpertPlacement(len(tops))
    settle(engine)
    for tier in engine.cache.tiers:
        assert all(placement.device(expert) == tier.device for expert in tier.cache)
    return [len(list(top.cache)) for top in tops]


@pytest.mark.parametrize(
    "system",
    [
        SystemConfig(),
        SystemConfig(prefetch=False, chunked=False, early_preemption=False, reordered=False),
        SystemConfig(reordered=False, per_layer=False),
        SystemConfig(eviction="regret", idle_prefetch=True, adaptive=True, per_layer=False),
        SystemConfig(hot_first=True, drop_used=True),
    ],
    ids=["promoe", "on-demand", "in order", "filled", "klotski"],
)
def test_devices__change_no_bit(folder, expected, system):
    num_devices = 3 if system.per_layer else 2
    model = serve(
        folder, budget="40%", devices=["cpu"] * num_devices, predictor="skip", system=system
    )
    engine = model.moecast.engine
    with model.moecast, torch.no_grad():
        assert torch.equal(model(TOKENS).logits, expected[0])
        assert torch.equal(model.generate(TOKENS, **GREEDY), expected[1])
        stats = model.moecast.stats()
        counts = held_where_they_belong(engine)
        assert all(link.busy_seconds > 0 for link in engine.loop.links)
    if not system.drop_used:
        assert min(counts) > 0
    assert [link.name for link in engine.loop.links] == [f"disk {d}" for d in range(num_devices)]
    assert stats["requests"] == stats["hits"] + stats["joins"] + stats["misses"] > 0
    assert stats["arena_slots"] == sum(arena.num_slots for arena in engine.arenas)


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


def test_devices__have_tiers_each(folder, expected):
    model = serve(folder, budget="30%", host_budget="80%", devices=["cpu", "cpu"])
    engine = model.moecast.engine
    with model.moecast, torch.no_grad():
        assert torch.equal(model(TOKENS).logits, expected[0])
        stats = model.moecast.stats()
        assert set(stats["lower_tiers"]) == {"disk 0", "disk 1"}
        assert all(tier["bytes_moved"] > 0 for tier in stats["lower_tiers"].values())
        held_where_they_belong(engine)
    assert [link.name for link in engine.loop.links] == ["copy 0", "disk 0", "copy 1", "disk 1"]


def test_devices__a_slow_link_does_not_delay_the_other_devices(folder, expected, monkeypatch):
    """Experts of the other device are computed first, and every bit is as before."""
    order, connect, is_ordered = [], assemble.connect, threading.Event()

    def slowed(store, spec, devices, arrivals, options):
        first, second = devices
        (ring,) = second.rings

        def transfer(task):
            """Slower than the other device's: one of its experts has been computed."""
            while is_ordered.is_set() and not order:
                time.sleep(0.001)
            ring.transfer(task)

        second = replace(second, rings=[ThreadRing(arrivals, transfer, name="slow")])
        return connect(store, spec, [first, second], arrivals, options)

    monkeypatch.setattr(assemble, "connect", slowed)
    model = serve(folder, budget="40%", devices=["cpu", "cpu"], system=SystemConfig(chunked=False))
    engine = model.moecast.engine
    with model.moecast, torch.no_grad():
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
    model = serve(folder, budget="40%", devices=["cpu", "cpu"])
    engine = model.moecast.engine
    read_in_python(engine)
    real = engine.store.read

    def read(layer, expert, chunks, slot):
        if expert % 2:
            raise TransferError("injected")
        real(layer, expert, chunks, slot)

    with model.moecast, torch.no_grad():
        engine.store.read = read
        with pytest.raises(TransferError, match="injected"):
            model(TOKENS)
        engine.store.read = real
        assert torch.equal(model(TOKENS).logits, expected[0])


def test_devices__are_interrupted_and_serve_again(folder, expected, monkeypatch):
    use_patchable_core(monkeypatch)
    model = serve(folder, budget="40%", devices=["cpu", "cpu"])
    engine = model.moecast.engine
    (top,) = (tier for tier in engine.cache.tiers if tier.is_top and tier.device == 1)
    request, calls = top.request, []

    def interrupted(expert):
        calls.append(expert)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return request(expert)

    with model.moecast, torch.no_grad():
        monkeypatch.setattr(top, "request", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model(TOKENS)
        assert torch.equal(model(TOKENS).logits, expected[0])
        assert count_pins(engine) == 0


def test_devices__a_group_of_generations_is_served_too(folder, expected):
    model = serve(folder, budget="40%", devices=["cpu", "cpu"])
    plain = plain_eager(folder)
    prompts = [TOKENS[:1], TOKENS[1:, :4]]
    with model.moecast:
        group = LockstepGroup(model)
        members = [group.start(lambda p=p: model.generate(p, **GREEDY)) for p in prompts]
        while group.sequences:
            group.step()
        group.close()
    for member, prompt in zip(members, prompts, strict=True):
        assert member.error is None
        assert torch.equal(member.result, plain.generate(prompt, **GREEDY))


def test_devices__close_ends_every_ring_and_the_files_last(folder):
    model = serve(folder, budget="40%", devices=["cpu"] * 3)
    engine, order = model.moecast.engine, []
    close = engine.store.close
    rings = [link.ring for link in engine.loop.links]
    engine.store.close = lambda: (order.append([r.running() for r in rings]), close())
    with torch.no_grad():
        model(TOKENS)
    model.moecast.close()
    assert order == [[[], [], []]]
    # On a busy machine, a thread that has been ended is there for a moment.
    wait_for(lambda: not any(t.name.startswith("moecast disk ") for t in threading.enumerate()))


def test_load__devices_that_do_not_go_together_are_named(folder):
    with pytest.raises(CheckpointError, match="cpu, cuda, xpu, mps only"):
        serve(folder, devices=["cpu", "meta"])
    with pytest.raises(CheckpointError, match="write auto, cpu"):
        serve(folder, devices="cpu,gpu7")
    with pytest.raises(BudgetError, match=r"too small for 2 devices.*budget=(\d+)") as caught:
        serve(folder, devices="cpu,cpu", budget="1KiB")
    least = re.search(r"budget=(\d+)", str(caught.value))
    assert least is not None
    serve(folder, devices="cpu,cpu", budget=int(least[1])).moecast.close()
    with pytest.raises(BudgetError, match="host_budget of 1024 bytes is too small for 2 devices"):
        serve(folder, devices="cpu,cpu", host_budget="1KiB")


def test_layer_experts__copies_parameters_home_if_tokens_stay():
    class Source:
        def ready(self, layer, wanted):
            yield {expert: {"w": torch.ones(2, device="meta")} for expert in wanted}

        def pin(self, layer, expert):
            return {"w": torch.ones(2)}

    far = LayerExperts(Source(), 0, home=torch.device("meta"))
    assert far.pin(3)["w"].is_meta
    assert [expert for expert, _ in far.ready([1, 4])] == [1, 4]
    here = LayerExperts(Source(), 0)
    weights = here.pin(3)["w"]
    assert not weights.is_meta
    assert all(weights[1]["w"].is_meta for weights in here.in_place([1]))


# ---- nodes of memory


def make_nodes(folder, *cpulists):
    for number, cpus in enumerate(cpulists):
        node = folder / f"node{number}"
        node.mkdir(parents=True)
        (node / "cpulist").write_text(cpus + "\n")
    return folder


def test_numa__reads_the_kernels_lists():
    assert parse_cpu_list("0-3,8\n") == {0, 1, 2, 3, 8}
    assert parse_cpu_list("5") == {5}
    assert parse_cpu_list("\n") == frozenset()


def test_numa__cpu_devices_take_the_nodes_in_turn(tmp_path, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 5}, raising=False)
    nodes = make_nodes(tmp_path / "nodes", "0-1", "2-5")
    cpu = torch.device("cpu")
    found = [find_near_cpus(cpu, number, nodes=nodes) for number in range(3)]
    assert found == [{0, 1}, {2, 5}, {0, 1}]


def test_numa__one_node_or_none_needs_nothing(tmp_path):
    cpu = torch.device("cpu")
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
    before = {int(task.name) for task in Path("/proc/self/task").iterdir()}
    model = serve(folder, budget="40%", devices=["cpu", "cpu"])
    with model.moecast, torch.no_grad():
        model(TOKENS)
        threads = {int(task.name) for task in Path("/proc/self/task").iterdir()} - before
        assert set(places) <= {frozenset(os.sched_getaffinity(thread)) for thread in threads}
    assert os.sched_getaffinity(0) == set(cpus)
