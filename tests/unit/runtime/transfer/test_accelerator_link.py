"""A device's ring orders every read and overwrite of a slot, on a stand-in device.

Its code is the one that runs on CUDA, ROCm and XPU; each edge that it makes is needed.
"""

import pytest
import torch

from runtime.accelerator import Accelerator, find_accelerator, open_accelerator
from runtime.transfer.copies import DeviceRing
from tests.builders.models import plain_eager, tiny_qwen2_moe
from tests.builders.ordered_accelerator import OrderedAccelerator, WatchedReads
from tests.builders.served import serve_with_rings

TOKENS = torch.randint(0, 64, (2, 7), generator=torch.Generator().manual_seed(3))
GREEDY = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_qwen2_moe(tmp_path_factory.mktemp("model"), num_layers=3, num_experts=12)


def generate(folder, monkeypatch, *, system, break_ring=None):
    """The tokens of a run over the stand-in, and the stand-in."""
    devices = []

    def make(name, arrivals, ring):
        if name != "copy":
            return ring
        copies = ring.transfer.__self__
        devices.append(OrderedAccelerator(copies._target))
        ordered = DeviceRing(arrivals, copies, devices[0])
        if break_ring is not None:
            break_ring(ordered, devices[0], monkeypatch)
        return ordered

    model = serve_with_rings(
        folder, monkeypatch, make, budget="20%", host_budget="60%", system=system
    )
    with model.moecast as handle, WatchedReads(devices[0]):
        tokens = model.generate(TOKENS, **GREEDY)
        prefetched = sum(counters.bytes_prefetched for counters in handle.engine.cache.counters)
    return tokens, devices[0], prefetched


@pytest.mark.parametrize("system", ["on-demand", "promoe", "mixtral-offloading"])
def test_ring__orders_every_read_and_overwrite(folder, monkeypatch, system):
    tokens, device, prefetched = generate(folder, monkeypatch, system=system)
    assert device.races == []
    assert torch.equal(tokens, plain_eager(folder).generate(TOKENS, **GREEDY))
    assert device.num_copies > 100
    assert device.num_reads > 100
    assert (prefetched > 0) == (system == "mixtral-offloading")


def without_fence(ring, device, monkeypatch):
    monkeypatch.setattr(ring, "computed", lambda _: None)


def without_waiting_for_the_fence(ring, device, monkeypatch):
    monkeypatch.setattr(ring._stream, "wait_event", lambda _: None)


def without_waiting_for_the_copy(ring, device, monkeypatch):
    make_event = device.make_event

    def forgetful():
        event = make_event()
        event.synchronize = lambda: None
        event.query = lambda: True
        return event

    monkeypatch.setattr(device, "make_event", forgetful)


def with_the_end_recorded_elsewhere(ring, device, monkeypatch):
    """The event after a copy is recorded on the computing stream."""
    submit, computing = ring.submit, device.current_stream()
    make_event = device.make_event

    def misplaced():
        event = make_event()
        record = event.record
        event.record = lambda _: record(computing)
        return event

    def submit_misplaced(ticket, task):
        monkeypatch.setattr(device, "make_event", misplaced)
        submit(ticket, task)

    monkeypatch.setattr(ring, "submit", submit_misplaced)


@pytest.mark.parametrize(
    ("break_ring", "race"),
    [
        (without_fence, "overwritten, its use not ended"),
        (without_waiting_for_the_fence, "overwritten, its use not ended"),
        (without_waiting_for_the_copy, "read, its copy not ended"),
        (with_the_end_recorded_elsewhere, "read, its copy not ended"),
    ],
)
def test_ring__each_missing_edge_is_a_race(folder, monkeypatch, break_ring, race):
    _, device, _ = generate(folder, monkeypatch, system="on-demand", break_ring=break_ring)
    assert any(race in found for found in device.races)


def test_accelerator__a_cpu_has_none_and_a_single_queue_orders_itself():
    assert open_accelerator(torch.device("cpu")) is None
    queue = open_accelerator(torch.device("mps"))
    assert queue is not None
    assert not queue.pins_memory
    assert queue.make_stream() == queue.current_stream()
    with queue.use(queue.make_stream()):
        target = torch.zeros(3)
        queue.copy(target, torch.ones(3))
    assert target.sum() == 3


@pytest.mark.gpu
@pytest.mark.skipif(find_accelerator() is None, reason="NO ACCELERATOR: its streams are untested")
def test_accelerator__threads_that_share_a_stream_get_their_own_back():
    """`with stream` would restore one thread's stream in another."""
    device = find_accelerator()
    accelerator = Accelerator(device)
    stream, before = accelerator.make_stream(), accelerator.current_stream()
    with accelerator.use(stream):
        assert accelerator.current_stream() == stream
        with accelerator.use(stream):
            pass
        assert accelerator.current_stream() == stream
    assert accelerator.current_stream() == before
