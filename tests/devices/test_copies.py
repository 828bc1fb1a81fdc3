"""The order of copies to a device and of what computes with them: each edge of it is needed."""

from functools import partial

import numpy as np
import pytest
import torch

from runtime.accelerator import Accelerator, open_accelerator
from runtime.config import Exact
from runtime.engine import assembly
from runtime.policy.counters import sum_counters
from runtime.transfer import copies
from runtime.transfer.arena import Arena
from tests.builders.models import plain_eager
from tests.builders.served import serve, serving, settle
from tests.builders.sim_device.streams import SimEvent, SimStream

TOKENS = torch.randint(1, 64, (2, 7), generator=torch.Generator().manual_seed(3))
GREEDY = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}


def generate(folder, device, system="on-demand"):
    budgets = {"budget": "20%", "host_budget": "60%"}
    with serving(folder, device=device, exact=Exact.EAGER, system=system, **budgets) as model:
        tokens = model.generate(TOKENS.to(device), **GREEDY)
        return tokens, sum_counters(model.moecast.engine.cache.counters).bytes_prefetched


@pytest.mark.parametrize("system", ["on-demand", "mixtral-offloading"])
def test_ring__orders_every_read_and_overwrite(folder, device, system):
    plain = plain_eager(folder).to(device)
    tokens, prefetched = generate(folder, device, system)
    assert torch.equal(tokens, plain.generate(TOKENS.to(device), **GREEDY))
    assert (prefetched > 0) == (system == "mixtral-offloading")


def without_fence(monkeypatch):
    monkeypatch.setattr(copies.DeviceRing, "computed", lambda *_: None)


def without_waits_of(monkeypatch, *, computing: bool):
    wait = SimStream.wait_event

    def wait_elsewhere(stream, event):
        if (stream in stream.devices._defaults) != computing:
            wait(stream, event)

    monkeypatch.setattr(SimStream, "wait_event", wait_elsewhere)


def with_the_end_recorded_elsewhere(monkeypatch):
    """The event after a copy is recorded on the computing stream."""
    record = SimEvent.record
    monkeypatch.setattr(SimEvent, "record", lambda one, _: record(one, one._devices._defaults[0]))


WRITES, READS = "copy on stream 2 of sim:0 writes", "on stream 0 of sim:0 reads"
EDGES = {
    "no fence": (without_fence, WRITES),
    "no wait for the fence": (partial(without_waits_of, computing=False), WRITES),
    "no wait for the copy": (partial(without_waits_of, computing=True), READS),
    "its end elsewhere": (with_the_end_recorded_elsewhere, READS),
}


@pytest.mark.parametrize(("remove", "race"), EDGES.values(), ids=EDGES)
def test_ring__each_missing_edge_is_a_race(folder, sim, monkeypatch, remove, race):
    remove(monkeypatch)
    generate(folder, "sim")
    monkeypatch.undo()
    assert any(race in found for found in sim.take_races())


def test_ring__copies_begin_after_the_work_under_way(folder, sim, monkeypatch):
    """An arena's memory may be what kernels that still run have used."""

    def make_arena(*args, device="cpu", **options):
        torch.ones(64, device=device)
        return Arena(*args, device=device, **options)

    monkeypatch.setattr(assembly, "Arena", make_arena)
    with serving(folder, device="sim", budget="100%", system="promoe", predictor="skip") as model:
        while not model.moecast.engine.cache.is_complete:
            model.moecast.engine.move_when_idle()
    assert not sim.races


def test_ring__the_host_waits_for_a_copy_where_nothing_else_comes(folder, sim):
    sim.random.random = lambda: 1.0  # no copy ends before somebody waits for it
    with serving(folder, device="sim", budget="100%", system="promoe", predictor="skip") as model:
        settle(model.moecast.engine)
        assert not model.moecast.engine.loop.links[0].ring.running()


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_pin__orders_overwrites_after_the_expert(folder, sim, is_interrupted):
    """Modules with a loop of their own compute more experts of a layer than have slots."""
    model = serve(folder, device="sim", budget="12%", host_budget="100%", exact=Exact.EAGER)

    def compute(engine, layer, experts):
        tokens_T = np.arange(6)
        engine.begin_step(tokens_T, np.zeros_like(tokens_T))
        try:
            engine.routed(layer, np.arange(12).reshape(6, 2), None, None)
            for expert in experts:
                engine.pin(layer, expert)["down_proj"].sum()
            if len(experts) == 1:
                raise KeyboardInterrupt
        finally:
            engine.end_step()

    with model.moecast as handle:
        if is_interrupted:
            with pytest.raises(KeyboardInterrupt):
                compute(handle.engine, 1, [0])
        compute(handle.engine, 0, range(12))
        assert not sim.races


def test_accelerator__a_cpu_has_none_and_a_single_queue_orders_itself():
    assert open_accelerator(torch.device("cpu")) is None
    queue = open_accelerator(torch.device("mps"))
    assert not queue.pins_memory
    assert queue.make_stream() == queue.current_stream()
    with queue.use(queue.make_stream()):
        target = torch.zeros(3)
        queue.copy(target, torch.ones(3))
    assert target.sum() == 3


def test_accelerator__threads_that_share_a_stream_get_their_own_back(device):
    """`with stream` would restore one thread's stream in another."""
    accelerator = Accelerator(device)
    stream, before = accelerator.make_stream(), accelerator.current_stream()
    with accelerator.use(stream):
        assert accelerator.current_stream() == stream
        with accelerator.use(stream):
            pass
        assert accelerator.current_stream() == stream
    assert accelerator.current_stream() == before
