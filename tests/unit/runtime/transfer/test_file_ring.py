"""Rings of stores and of threads: a transfer ends with the store's bytes or with its error."""

import os
import threading
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from runtime.config import PageCache
from runtime.errors import Fault, TransferError
from runtime.policy.tier import TransferTask
from runtime.store.base import ExpertStore, allocate_aligned, as_memoryview
from runtime.store.files import FileRange, FileReader
from runtime.store.packed.store import open_store
from runtime.tools.bench.tasks import cached_bytes
from runtime.transfer.arena import Arena
from runtime.transfer.file_ring import StoreRing
from runtime.transfer.ring import ARRIVED, DAMAGED, FAILED
from runtime.transfer.thread_ring import ThreadRing, make_arrivals, rings
from tests.builders.models import tiny_qwen2_moe
from tests.builders.packed import flip_bit, packed, read_expert, source_of
from tests.builders.page_cache import uncached_zeros
from tests.builders.parts import WAIT_SECONDS
from tests.unit.runtime.transfer.test_rings import ARRIVALS, COMPILED


@pytest.fixture(params=ARRIVALS)
def arrivals(request):
    return request.param()


def task(expert: tuple[int, int], slot: int, chunks: range, *, high: bool = True) -> TransferTask:
    return TransferTask(expert, slot, chunks.start, chunks.stop, 1, high, None)


def settled(ring, arrivals, count: int) -> dict[int, int]:
    """Status of each of so many tickets, once they have ended, as an engine does it."""
    ended: dict[int, int] = {}
    while len(ended) < count:
        assert arrivals.wait(WAIT_SECONDS)
        for ticket, status, seconds, _ in arrivals.take():
            assert seconds >= 0
            if ring.settle(ticket, status):
                assert ticket not in ended
                ended[ticket] = status
    return ended


def run(ring, arrivals, experts, *, first: int = 0, chunks: range = range(1)) -> dict[int, int]:
    """Status of each ticket, from the first on, of experts of layer 0, each into the slot of its
    number."""
    for ticket, expert in enumerate(experts, first):
        ring.submit(ticket, task((0, expert), expert, chunks))
    return settled(ring, arrivals, len(experts))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """Parts of 16 KiB and 64 KiB."""
    folder = tmp_path_factory.mktemp("rings") / "model"
    return tiny_qwen2_moe(folder, hidden_size=128, expert_width=128, num_experts=6)


@pytest.fixture(params=["packed", "checkpoint", "converted"])
def open_kind(request, tmp_path, model):
    if request.param == "packed":
        folder = packed(model, tmp_path / "store")
        return lambda: open_store(folder, None)
    dtype = "auto" if request.param == "checkpoint" else "bfloat16"
    return lambda: source_of(model, dtype=dtype)[0]


@pytest.mark.parametrize("num_threads", [1, 3])
def test_store_ring__fills_slots_as_the_store_does(open_kind, arrivals, num_threads):
    store = open_kind()
    arena = Arena(store.layouts, 12)
    ring = StoreRing(arrivals, store, arena, num_threads=num_threads)
    expected = [allocate_aligned(store.layouts[0].num_bytes).zero_() for _ in range(12)]
    for slot, (layer, expert) in enumerate(product(range(2), range(6))):
        arena.slot(slot).zero_()
        chunks = range(expert % 2, len(store.layouts[layer].chunks) - (expert == 4))
        store.read(layer, expert, chunks, expected[slot])
        ring.submit(slot, task((layer, expert), slot, chunks, high=expert > 3))
    assert settled(ring, arrivals, 12) == dict.fromkeys(range(12), ARRIVED)
    for slot in range(12):
        assert torch.equal(arena.slot(slot), expected[slot])
    assert (ring.running(), ring.errors) == ([], {})
    assert ring.close(WAIT_SECONDS)


def error_of(store: ExpertStore, expert: tuple[int, int]) -> TransferError:
    """What the store itself says of a read."""
    with pytest.raises(TransferError) as caught:
        read_expert(store, *expert)
    return caught.value


def num_open_files() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


def files_of(store: ExpertStore) -> Path:
    """The file of the first layer's experts."""
    return store.extents(0, 0)[0].file


@pytest.mark.parametrize("open_kind", ["packed", "checkpoint"], indirect=True)
def test_store_ring__fails_with_the_words_of_the_store(open_kind, arrivals):
    num_before, store = num_open_files(), open_kind()
    ring = StoreRing(arrivals, store, Arena(store.layouts, 6), num_threads=2)
    chunks, file = range(len(store.layouts[0].chunks)), files_of(store)
    content = file.read_bytes()
    try:
        assert run(ring, arrivals, [0], chunks=chunks) == {0: ARRIVED}
        os.truncate(file, 10_000)
        failed = run(ring, arrivals, [*range(6)] * 2, first=1, chunks=chunks)
        assert failed == dict.fromkeys(range(1, 13), FAILED)
        error, expected = ring.errors[2], error_of(store, (0, 1))
        assert str(error) == str(expected)
        assert "ends at byte 10000" in str(error)
        assert error.fault == expected.fault == Fault.TRUNCATED
        file.unlink()
        assert run(ring, arrivals, [0], first=13, chunks=chunks) == {13: FAILED}
        assert "No such file" in str(ring.errors[13])
    finally:
        file.write_bytes(content)  # fetched again: another file of the same name
    assert run(ring, arrivals, [0], first=14, chunks=chunks) == {14: ARRIVED}
    assert ring.close(WAIT_SECONDS)
    assert num_open_files() == num_before


@pytest.mark.parametrize("open_kind", ["packed"], indirect=True)
def test_store_ring__finds_damage_in_every_chunk(open_kind, arrivals):
    store = open_kind()
    ring = StoreRing(arrivals, store, Arena(store.layouts, 1), num_threads=1)
    ranges = store.layouts[0].chunk_ranges
    for chunk, [(start, _)] in enumerate(ranges):
        bit = 8 * (start + 100) + 2
        flip_bit(files_of(store), bit)
        failed = run(ring, arrivals, [0], first=chunk, chunks=range(len(ranges)))
        assert failed == {chunk: FAILED}
        error = ring.errors[chunk]
        assert str(error) == str(error_of(store, (0, 0)))
        assert f"chunk {chunk}) are damaged" in str(error)
        assert error.fault == Fault.DAMAGED
        flip_bit(files_of(store), bit)
    assert ring.close(WAIT_SECONDS)


class StoredFile(ExpertStore):
    """Experts that lie in one file, one after another; all is as the tests say it is."""

    def __init__(self, file: Path, *, num_bytes: int = 1_000, checksum: int | None = None):
        one_range = {"num_bytes": num_bytes, "alignment": 64, "chunk_ranges": [[(0, num_bytes)]]}
        self.layouts = [SimpleNamespace(**one_range)]  # type: ignore[list-item]
        self.experts_per_layer = [8]
        self.files = FileReader()
        self._file = file
        self._checksum = checksum
        self.num_reads = 0

    def extents(self, layer: int, expert: int) -> list[FileRange]:
        return [FileRange(self._file, expert * self.layouts[0].num_bytes, self._checksum)]

    def read(self, layer, expert, chunks, slot) -> None:
        self.num_reads += 1
        num_bytes = self.layouts[0].num_bytes
        self.files.read(self._file, expert * num_bytes, as_memoryview(slot[:num_bytes]), what="it")


def test_store_ring__an_error_of_the_disk_is_tried_and_named_by_the_store(arrivals):
    # The first page of a process is never there: each read of it is EIO.
    store = StoredFile(Path("/proc/self/mem"))
    ring = StoreRing(arrivals, store, Arena(store.layouts, 1), num_threads=1)
    assert run(ring, arrivals, [0]) == {0: FAILED}
    assert "reading 1000 bytes of it at 0 failed 3 times: [Errno 5]" in str(ring.errors[0])
    assert ring.errors[0].fault == Fault.READ
    assert ring.close(WAIT_SECONDS)


@COMPILED
def test_store_ring__what_fails_once_arrives_the_slow_way_unless_it_is_given_up(tmp_path):
    (tmp_path / "experts").write_bytes(os.urandom(8_000))
    altered = StoredFile(tmp_path / "experts", checksum=1)  # which no bytes have
    arrivals, arena = rings.Arrivals(), Arena(altered.layouts, 8)
    ring = StoreRing(arrivals, altered, arena, num_threads=1)
    ring.submit(8, task((0, 0), 0, range(1)))
    ring.replace_thread(8)
    assert settled(ring, arrivals, 1) == {8: DAMAGED}
    assert altered.num_reads == 0
    assert run(ring, arrivals, range(8)) == dict.fromkeys(range(8), ARRIVED)
    assert altered.num_reads == 8
    slots = b"".join(bytes(arena.slot(expert)[:1_000].numpy()) for expert in range(8))
    assert slots == (tmp_path / "experts").read_bytes()
    assert ring.close(WAIT_SECONDS)


def test_store_ring__what_is_cancelled_keeps_no_file_open(tmp_path, arrivals):
    num_before, file = num_open_files(), tmp_path / "experts"
    file.write_bytes(os.urandom(8_000_000))
    store = StoredFile(file, num_bytes=1_000_000)
    ring = StoreRing(arrivals, store, Arena(store.layouts, 2), num_threads=1)
    cancelled = 0
    for ticket in range(400):
        ring.submit(ticket, task((0, ticket % 8), ticket % 2, range(1), high=ticket % 2 == 0))
        cancelled += ring.cancel(ticket - 1) if ticket else 0
    assert len(settled(ring, arrivals, 400 - cancelled)) == 400 - cancelled
    for ticket in range(400, 420):
        ring.submit(ticket, task((0, 0), 0, range(1)))
    assert ring.close(WAIT_SECONDS)
    assert ring.close(0.0)
    with pytest.raises(RuntimeError, match="closed"):
        ring.submit(500, task((0, 0), 0, range(1)))
    assert num_open_files() == num_before


@pytest.mark.parametrize("page_cache", PageCache)
def test_store_ring__uses_the_page_cache_as_configured(tmp_path, page_cache):
    file = uncached_zeros(tmp_path / "experts", 8_000_000)
    store, arrivals = StoredFile(file, num_bytes=1_000_000), make_arrivals()
    store.files = FileReader(page_cache=page_cache)
    ring = StoreRing(arrivals, store, Arena(store.layouts, 8), num_threads=1)
    assert run(ring, arrivals, range(8)) == dict.fromkeys(range(8), ARRIVED)
    kept = cached_bytes([file])
    assert kept >= 8_000_000 if page_cache is PageCache.KEEP else kept == 0
    assert ring.close(WAIT_SECONDS)


def test_store_ring__reads_on_the_processors_given(tmp_path, arrivals):
    (tmp_path / "experts").write_bytes(bytes(8_000))
    store, cpus = StoredFile(tmp_path / "experts"), frozenset([min(os.sched_getaffinity(0))])
    ring = StoreRing(arrivals, store, Arena(store.layouts, 1), num_threads=1, cpus=cpus)
    tasks = Path("/proc/self/task")
    before = set(tasks.iterdir())
    assert run(ring, arrivals, [0]) == {0: ARRIVED}
    (thread,) = set(tasks.iterdir()) - before
    assert os.sched_getaffinity(int(thread.name)) == cpus
    assert ring.close(WAIT_SECONDS)


class Gate:
    """A transfer that waits at each task until the test lets it go."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self.open: dict[int, threading.Event] = {number: threading.Event() for number in range(20)}
        self.entered: dict[int, threading.Event] = {n: threading.Event() for n in range(20)}

    def __call__(self, task: TransferTask) -> None:
        number = task.slot
        self.order.append(number)
        self.entered[number].set()
        assert self.open[number].wait(WAIT_SECONDS)

    def opens(self, *numbers: int) -> None:
        for number in numbers:
            self.open[number].set()


def numbered(number: int, *, high: bool = False) -> TransferTask:
    return task((0, number), number, range(1), high=high)


class TestThreadRing:
    def test_requests__come_first_and_cancelled_ones_never(self, arrivals):
        gate = Gate()
        ring = ThreadRing(arrivals, gate, name="test")
        for number, high in enumerate([False, False, True, False, True, True, False]):
            ring.submit(number, numbered(number, high=high))
            if number == 0:
                assert gate.entered[0].wait(WAIT_SECONDS)
        assert [ring.cancel(number) for number in (0, 3, 4, 3)] == [False, True, True, False]
        assert [ticket for ticket, _ in ring.running()] == [0]
        gate.opens(*range(7))
        assert settled(ring, arrivals, 5) == dict.fromkeys([0, 1, 2, 5, 6], ARRIVED)
        assert gate.order == [0, 2, 5, 1, 6]
        assert not ring.cancel(6)
        assert ring.close(WAIT_SECONDS)

    def test_thread__that_hangs_is_replaced_and_its_transfer_reported(self, arrivals):
        gate = Gate()
        ring = ThreadRing(arrivals, gate, name="test")
        ring.submit(0, numbered(0))
        assert gate.entered[0].wait(WAIT_SECONDS)
        ring.submit(1, numbered(1))
        ((ticket, seconds),) = ring.running()
        assert ticket == 0
        assert 0 <= seconds < WAIT_SECONDS
        ring.replace_thread(0)
        gate.opens(1)
        assert settled(ring, arrivals, 1) == {1: ARRIVED}
        assert [ticket for ticket, _ in ring.running()] == [0]
        assert not ring.close(0.0)
        gate.opens(0)
        assert settled(ring, arrivals, 1) == {0: ARRIVED}
        assert ring.close(WAIT_SECONDS)
        assert ring.running() == []

    def test_close__drops_what_has_not_begun(self, arrivals):
        gate = Gate()
        ring = ThreadRing(arrivals, gate, 2, name="test")
        for number in range(5):
            ring.submit(number, numbered(number))
        for number in (0, 1):
            assert gate.entered[number].wait(WAIT_SECONDS)
        assert not ring.close(0.0)
        gate.opens(*range(5))
        assert ring.close(WAIT_SECONDS)
        assert sorted(gate.order) == [0, 1]
        assert len(arrivals.take()) == 2

    @pytest.mark.parametrize("death", [ValueError("a bug"), SystemExit(3), MemoryError()])
    def test_transfer__that_raises_fails_and_the_next_one_runs(self, arrivals, death, caplog):
        refusal = TransferError("no bytes", fault=Fault.TRUNCATED)
        transfer = Mock(side_effect=[None, refusal, death, None])
        ring = ThreadRing(arrivals, transfer, name="disk")
        for number in range(4):
            ring.submit(number, numbered(number))
        assert settled(ring, arrivals, 4) == {0: ARRIVED, 1: FAILED, 2: FAILED, 3: ARRIVED}
        assert ring.errors.keys() == {1, 2}
        assert ring.errors[1] is refusal
        assert ring.errors[2].fault == Fault.DIED
        assert type(death).__name__ in str(ring.errors[2])
        assert "layer 0 expert 2" in str(ring.errors[2])
        assert "disk: the transfer thread has died; starting another" in caplog.messages
        assert ring.close(WAIT_SECONDS)

    def test_submits__of_a_tight_loop_all_run_once(self, arrivals):
        seen: list[int] = []
        ring = ThreadRing(arrivals, lambda task: seen.append(task.slot), 3, name="test")
        cancelled = set()
        for number in range(5_000):
            ring.submit(number, numbered(number, high=number % 3 == 0))
            if number % 5 == 4 and ring.cancel(number - 2):
                cancelled.add(number - 2)
        expected = set(range(5_000)) - cancelled
        assert settled(ring, arrivals, len(expected)) == dict.fromkeys(expected, ARRIVED)
        assert sorted(seen) == sorted(expected)
        assert ring.close(WAIT_SECONDS)
