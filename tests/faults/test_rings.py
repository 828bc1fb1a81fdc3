"""Compiled reads of a disk that hangs, fails or returns less than it was asked for."""

import errno
import gc
import os
import weakref

import pytest

from runtime.store.files import DESCRIPTORS
from runtime.transfer.file_ring import PART
from runtime.transfer.ring import ARRIVED
from runtime.transfer.thread_ring import rings
from tests.builders.faults.rules import Disk, Rule
from tests.builders.parts import Memory, statuses
from tests.faults.conftest import mount_faulty_disk

pytestmark = [pytest.mark.faults, pytest.mark.skipif(rings is None, reason="no C compiler")]

SIZE = 300_001
PAUSE_SECONDS = 0.01


@pytest.fixture
def content(tmp_path) -> bytes:
    """Of the files a and b."""
    (tmp_path / "disk").mkdir()
    content = os.urandom(SIZE)
    for name in "ab":
        (tmp_path / "disk" / name).write_bytes(content)
    return content


@pytest.fixture
def disk(tmp_path, content: bytes):
    with mount_faulty_disk(tmp_path / "disk", tmp_path / "mounted") as mounted:
        mounted.is_well()
        yield mounted


@pytest.fixture
def descriptors(disk: Disk):
    """Of a and b, for direct reads too."""
    flags = os.O_RDONLY, os.O_DIRECT
    opened = {name: [os.open(disk.mount / name, flag) for flag in flags] for name in "ab"}
    yield {name: DESCRIPTORS.pack(*pair) for name, pair in opened.items()}
    for pair in opened.values():
        for descriptor in pair:
            os.close(descriptor)


WHOLE = PART.pack(0, 0, 0, SIZE, 100, 0)


def start_and_freeze(disk: Disk, file: bytes, *, num_threads: int):
    """Arrivals, memory and a ring whose only read hangs."""
    arrivals, memory = rings.Arrivals(), Memory(1 << 20)
    ring = rings.FileRing(arrivals, num_threads, memory=memory)
    disk.fails(Rule("freeze", file="a"))
    ring.submit(0, True, WHOLE, file, memory.address)
    while not disk.num_faults():
        assert not arrivals.wait(PAUSE_SECONDS)
    return arrivals, memory, ring


def test_read__that_hangs_is_left_behind_until_it_ends(disk, descriptors, content):
    arrivals, memory, ring = start_and_freeze(disk, descriptors["a"], num_threads=1)
    is_kept = weakref.ref(memory)
    ring.submit(1, True, WHOLE, descriptors["b"], memory.address + SIZE)
    ring.submit(2, False, WHOLE, descriptors["b"], memory.address + SIZE)
    ((ticket, seconds),) = ring.running()
    assert ticket == 0
    assert seconds > 0
    assert not ring.cancel(0)
    assert ring.cancel(2)
    ring.replace_thread(0)
    assert statuses(arrivals) == {1: ARRIVED}
    assert memory.bytes[SIZE + 100 : 2 * SIZE + 100] == content
    assert [ticket for ticket, _ in ring.running()] == [0]
    assert not ring.close(PAUSE_SECONDS)
    disk.is_well()
    assert statuses(arrivals) == {0: ARRIVED}
    assert memory.bytes[100 : SIZE + 100] == content
    assert ring.close(60.0)
    del ring, memory
    gc.collect()
    assert is_kept() is None


def test_memory__outlives_its_ring_while_a_read_hangs(disk, descriptors):
    arrivals, memory, ring = start_and_freeze(disk, descriptors["a"], num_threads=2)
    is_kept = weakref.ref(memory)
    assert not ring.close(0.0)
    del ring, memory
    gc.collect()
    assert is_kept() is not None
    disk.is_well()
    assert statuses(arrivals) == {0: ARRIVED}


FAULTS = {
    "is refused once": (Rule("eio", file="a", start=200_000, times=1), {0: errno.EIO, 1: ARRIVED}),
    "arrives in parts": (Rule("short", file="a"), {0: ARRIVED, 1: ARRIVED}),
}


@pytest.mark.parametrize(("rule", "expected"), FAULTS.values(), ids=FAULTS)
def test_read__is_reported_if_the_disk_refuses_it_and_read_on_if_it_falls_short(
    disk, descriptors, content, rule, expected
):
    arrivals, memory = rings.Arrivals(), Memory(1 << 20)
    ring = rings.FileRing(arrivals, 1, memory=memory)
    disk.fails(rule)
    for ticket in range(2):
        ring.submit(ticket, True, WHOLE, descriptors["a"], memory.address)
    assert statuses(arrivals, 2) == expected
    assert memory.bytes[100 : SIZE + 100] == content
    assert disk.num_faults() == 1 if rule.times else disk.num_faults() > 2
    assert ring.close(60.0)
