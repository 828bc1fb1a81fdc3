"""The simulated devices themselves: they refuse, delay and lack what a GPU does."""

import numpy as np
import pytest
import torch

from tests.builders.sim_device.backend import simulated
from tests.builders.sim_device.streams import SPOILED

HERE = torch.tensor([1.0, 2.0, 3.0])
KEPT = [1.0, 2.0, 3.0]


def pinned_bytes(value: int) -> torch.Tensor:
    return torch.full((64,), value, dtype=torch.uint8, pin_memory=True)


def device_bytes() -> torch.Tensor:
    made = torch.zeros(64, dtype=torch.uint8, device="sim")
    torch.accelerator.synchronize("sim:0")
    return made


# ---- places


def test_tensor__its_bytes_are_seen_through_a_copy_only(sim):
    there = HERE.to("sim")
    assert there.device == torch.device("sim:0")
    assert there.cpu().tolist() == there.tolist() == KEPT
    assert float(there.sum()) == 6.0
    for look in (lambda: there.numpy(), lambda: np.asarray(there), lambda: memoryview(there)):
        with pytest.raises((TypeError, RuntimeError)):
            look()
    assert there.data_ptr() % 64 == 0
    assert there.data_ptr() > 1 << 60
    assert not there.is_cpu


MIXES = [
    lambda here, there: here + there,
    lambda here, there: there.add_(here),
    lambda here, there: torch.cat([here, there]),
    lambda here, there: torch.nn.functional.linear(there, here[None]),
    lambda here, there: here[there > 1],
    lambda here, there: torch.equal(here, there),
    lambda _, there: there + there.to("sim:1"),
    lambda _, there: there.to("sim:1")[there > 1],
]


@pytest.mark.parametrize("mix", MIXES)
def test_operation__on_tensors_of_two_places_fails(sim, mix):
    with pytest.raises(RuntimeError, match="same device"):
        mix(HERE.clone(), HERE.to("sim"))


def test_grouped_product__reads_the_matrices_of_groups_with_rows_only(sim):
    rows, matrices = torch.randn(3, 16), torch.randn(4, 16, 16)
    ends = torch.tensor([0, 2, 2, 3], dtype=torch.int32)
    there = matrices.to("sim")
    on_another_stream(lambda: there[2].copy_(torch.empty(16, 16).pin_memory(), non_blocking=True))
    found = torch.nn.functional.grouped_mm(rows.to("sim"), there, offs=ends.to("sim"))
    expected = torch.cat([rows[:2] @ matrices[1], rows[2:] @ matrices[3]])
    torch.testing.assert_close(found.cpu(), expected)
    there[torch.tensor([0, 3, 3])].sum()
    assert not sim.take_races()


# ---- memory


def test_memory__has_a_size_and_is_given_back():
    with simulated(memory_bytes=1 << 20) as sim:
        half = torch.zeros(1 << 19, dtype=torch.uint8, device="sim")
        assert torch.accelerator.get_memory_info("sim")[0] == 1 << 19
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
            torch.zeros((1 << 19) + 1, dtype=torch.uint8, device="sim")
        other = torch.zeros((1 << 19) + 1, dtype=torch.uint8, device="sim:1")
        view = half[:3]
        del half
        assert sim.memories[0].used_bytes == 1 << 19
        del view, other
        assert sim.memories[0].used_bytes == sim.memories[1].used_bytes == 0


# ---- late copies


def test_copy__from_pinned_memory_is_late_and_spoils_its_target_until_then(sim):
    sim.random.random = lambda: 1.0  # nothing runs early
    source, target = pinned_bytes(3), device_bytes()
    stream, event = torch.Stream("sim"), torch.Event("sim")
    torch.accelerator.set_stream(stream)
    target.copy_(source, non_blocking=True)
    event.record(stream)
    assert set(target.raw.tolist()) == {SPOILED}
    assert not event.query()
    source.fill_(4)  # too early
    event.synchronize()
    assert set(target.raw.tolist()) == {4}
    assert event.query()


@pytest.mark.parametrize(("pinned", "non_blocking"), [(False, True), (True, False)])
def test_copy__from_other_memory_or_a_blocking_one_has_ended(sim, pinned, non_blocking):
    source = pinned_bytes(3) if pinned else torch.full((64,), 3, dtype=torch.uint8)
    target = device_bytes()
    before = sim.counts["synchronisations"]
    target.copy_(source, non_blocking=non_blocking)
    assert sim.counts["synchronisations"] == before + 1
    assert set(target.raw.tolist()) == {3}


def test_copy__to_the_host_is_spoiled_until_it_is_waited_for(sim):
    sim.random.random = lambda: 1.0
    late = HERE.to("sim").to("cpu", non_blocking=True)
    assert late.is_pinned()
    assert late.tolist() != KEPT
    torch.accelerator.synchronize()
    assert late.tolist() == KEPT


def test_kernel__runs_after_the_copies_of_its_stream_and_those_it_waits_for(sim):
    sim.random.random = lambda: 1.0
    source, target = pinned_bytes(3), device_bytes()
    target.copy_(source, non_blocking=True)
    assert set((target + 1).tolist()) == {4}
    stream, event, computing = torch.Stream("sim"), torch.Event("sim"), sim.stream()
    event.record(computing)
    stream.wait_event(event)
    torch.accelerator.set_stream(stream)
    target.copy_(pinned_bytes(5), non_blocking=True)
    event.record(stream)
    torch.accelerator.set_stream(computing)
    computing.wait_event(event)
    assert set((target + 1).tolist()) == {6}


def test_copies__of_two_streams_end_in_every_order_that_events_allow():
    found = set()
    for seed in range(40):
        with simulated(seed=seed) as sim:
            sources, target = [pinned_bytes(3), pinned_bytes(4)], device_bytes()
            halves, events = target.split(32), []
            for half, source in zip(halves, sources, strict=True):
                stream = torch.Stream("sim")
                torch.accelerator.set_stream(stream)
                half.copy_(source[:32], non_blocking=True)
                events.append(stream.record_event())
            torch.accelerator.set_stream(sim._defaults[0])
            found.add(tuple(event.query() for event in events))
    assert found == {(False, False), (False, True), (True, False), (True, True)}


def test_event__of_another_device_cannot_be_recorded(sim):
    with pytest.raises(RuntimeError, match="does not match"):
        torch.Event("sim:1").record(sim.stream("sim:0"))


# ---- races


def on_another_stream(work) -> None:
    before = torch.accelerator.current_stream("sim")
    torch.accelerator.set_stream(torch.Stream("sim"))
    work()
    torch.accelerator.set_stream(before)


def test_race__memory_is_written_that_earlier_work_may_use(sim):
    torch.zeros(64, dtype=torch.uint8, device="sim")
    target = torch.empty(64, dtype=torch.uint8, device="sim")
    on_another_stream(lambda: target.copy_(pinned_bytes(1), non_blocking=True))
    assert "written by stream 0" in sim.take_races()[0]


def test_race__memory_is_freed_that_another_stream_uses(sim):
    def copy_to_another() -> None:
        target = device_bytes()
        on_another_stream(lambda: target.copy_(pinned_bytes(1), non_blocking=True))
        for stream in sim.streams:
            stream.run()

    copy_to_another()
    assert "is freed" in sim.take_races()[0]


def test_race__there_is_none_for_other_bytes_or_after_a_wait(sim):
    target = device_bytes()
    on_another_stream(lambda: target[:32].copy_(pinned_bytes(1)[:32], non_blocking=True))
    target[32:].sum()
    torch.accelerator.synchronize("sim")
    target.sum()
    assert not sim.take_races()


def test_simulated__fails_where_something_raced():
    def race() -> None:
        with simulated():
            target = device_bytes()
            on_another_stream(lambda: target.copy_(pinned_bytes(1), non_blocking=True))
            target.sum()

    with pytest.raises(AssertionError, match="0 to 64, written by stream 2.* does not wait for"):
        race()
    assert not torch.accelerator.is_available() or torch.cuda.is_available()
