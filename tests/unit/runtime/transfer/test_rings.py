"""Compiled threads fill memory with the right bytes, and say what went wrong; `Arrivals`."""

import errno
import gc
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import xxhash

from runtime.config import PageCache
from runtime.store.files import BLOCK, DESCRIPTORS, FileReader
from runtime.transfer.file_ring import CHECKED, DROPPED, PART
from runtime.transfer.ring import ARRIVED, DAMAGED, END_OF_FILE
from runtime.transfer.thread_ring import QueuedArrivals, rings
from tests.builders.killing import in_a_child
from tests.builders.parts import WAIT_SECONDS, Memory, await_arrivals, statuses
from tests.builders.processes import run_python

FILE_BYTES = 3_000_001
CONTENT = random.Random(0).randbytes(FILE_BYTES)
MEMORY_BYTES = 6 << 20
COMPILED = pytest.mark.skipif(rings is None, reason="no C compiler")
ARRIVALS = [QueuedArrivals, pytest.param(rings and rings.Arrivals, marks=COMPILED)]


@pytest.fixture(params=ARRIVALS)
def arrivals(request):
    return request.param()


@pytest.fixture(params=["direct", "buffered", "in memory"])
def descriptors(request, tmp_path: Path):
    """Of a file with the content."""
    folder = Path("/dev/shm") if request.param == "in memory" else tmp_path
    if not folder.is_dir():
        pytest.skip("no file system in memory")
    file = folder / f"moecast-{os.getpid()}"
    file.write_bytes(CONTENT)
    page_cache = PageCache.KEEP if request.param == "buffered" else PageCache.BYPASS
    with FileReader(page_cache=page_cache) as reader:
        (opened,) = reader.pin([file])
        if request.param == "direct" and opened.direct is None:
            pytest.skip("no direct reads here")
        yield opened.packed
        reader.unpin([opened])
    file.unlink()


def untimed(taken: list[tuple]) -> list[tuple]:
    """Arrivals without the time at which they were posted."""
    return [(ticket, status, seconds) for ticket, status, seconds, _ in taken]


FIELDS = [(0, 0, 0, 1), (-2, 0, 0, 1), (-1, 4, 0, 1), (-1, 0, 0, -1), (-1, 0, -1, 1)]
"""File, flags, offset and size of parts that are refused without files."""
MALFORMED = [(b"x", b""), (PART.pack(0, 0, 0, 1, 0, 0), b"x")]
MALFORMED += [(PART.pack(*fields, 0, 0), b"") for fields in [*FIELDS, (-1, CHECKED, 0, 240)]]


@COMPILED
class TestFileRing:
    @pytest.fixture
    def arrivals(self):
        return rings.Arrivals()

    @pytest.fixture
    def memory(self) -> Memory:
        return Memory(MEMORY_BYTES)

    @pytest.fixture(params=[1, 3])
    def ring(self, request, arrivals, memory):
        ring = rings.FileRing(arrivals, request.param, None, memory)
        yield ring
        assert ring.close(WAIT_SECONDS)

    def test_parts__of_any_place_and_size_arrive(self, ring, arrivals, memory, descriptors):
        rng = random.Random(1)
        for ticket in range(40):
            memory.bytes[:] = bytes(MEMORY_BYTES)
            expected, parts = bytearray(MEMORY_BYTES), []
            place, offset = rng.randrange(2 * BLOCK), rng.randrange(FILE_BYTES)
            for _ in range(rng.randrange(1, 5)):
                sizes = rng.randrange(1_000), rng.randrange(1_200_000), BLOCK * rng.randrange(40)
                size = rng.choice(sizes)
                # Where the last one ended, near it, or elsewhere; or all on the edges of blocks.
                near, elsewhere = offset + rng.randrange(2 * BLOCK), rng.randrange(1_000_000)
                offset = rng.choice([offset, near, elsewhere])
                if rng.random() < 0.3:
                    offset, place = offset // BLOCK * BLOCK, -(-place // BLOCK) * BLOCK
                offset = max(0, min(offset, FILE_BYTES - size))
                wanted = CONTENT[offset : offset + size]
                flags = DROPPED | CHECKED * (size > 240)
                checksum = xxhash.xxh3_64_intdigest(wanted)
                parts.append(PART.pack(0, flags, offset, size, place, checksum))
                expected[place : place + size] = wanted
                offset, place = offset + size, place + size + rng.choice([0, 0, 1, 64, 5_000])
            rng.shuffle(parts)
            ring.submit(ticket, ticket % 2 == 0, b"".join(parts), descriptors, memory.address)
            assert statuses(arrivals) == {ticket: ARRIVED}
            assert memory.bytes == expected

    def test_direct_reads__refused_go_through_the_cache(self, ring, arrivals, memory, tmp_path):
        (tmp_path / "file").write_bytes(CONTENT)
        file = os.open(tmp_path / "file", os.O_RDONLY)
        refusing = os.open("/proc/self/ns/mnt", os.O_RDONLY)  # each read is EINVAL
        parts = PART.pack(0, 0, 1, 1_000, 0, 0) + PART.pack(0, 0, 2_000, 900_000, 2_000, 0)
        ring.submit(0, True, parts, DESCRIPTORS.pack(file, refusing), memory.address)
        assert statuses(arrivals) == {0: ARRIVED}
        assert memory.bytes[:1_000] == CONTENT[1:1_001]
        assert memory.bytes[2_000:902_000] == CONTENT[2_000:902_000]
        os.close(file)
        os.close(refusing)

    @pytest.mark.parametrize("size", [100, 70_000, 1_000_000])
    def test_end_of_file__is_reported(self, ring, arrivals, memory, descriptors, size):
        for ticket, beyond in enumerate((1, size - 1, size, 100_000)):
            part = PART.pack(0, 0, FILE_BYTES - size + beyond, size, 0, 0)
            ring.submit(ticket, True, part, descriptors, memory.address)
        assert set(statuses(arrivals, 4).values()) == {END_OF_FILE}

    def test_errors__are_reported_by_their_number(self, ring, arrivals, memory):
        own = os.open("/proc/self/mem", os.O_RDONLY)  # whose first page is never there
        folder = os.open("/", os.O_RDONLY)
        for ticket, files in enumerate([(own, -1), (own, own), (folder, -1)]):
            part = PART.pack(0, 0, 0, 100, 0, 0)
            ring.submit(ticket, True, part, DESCRIPTORS.pack(*files), memory.address)
        assert statuses(arrivals, 3) == {0: errno.EIO, 1: errno.EIO, 2: errno.EISDIR}
        os.close(own)
        os.close(folder)

    def test_checksum__equals_that_of_xxhash(self, ring, arrivals, memory):
        source = Memory(MEMORY_BYTES)
        source.bytes[:FILE_BYTES] = CONTENT
        sizes = [*range(241, 2_300), 4_096, 65_536, 1_000_003]
        for size in sizes:
            checksum = xxhash.xxh3_64_intdigest(CONTENT[:size])
            part = PART.pack(-1, CHECKED, source.address, size, memory.address, checksum)
            ring.submit(size, True, part, b"")
        assert set(statuses(arrivals, len(sizes)).values()) == {ARRIVED}

    @pytest.mark.parametrize("size", [241, 4_096, 100_001])
    def test_damage__of_any_byte_is_found(self, ring, arrivals, memory, size):
        source = Memory(MEMORY_BYTES)
        source.bytes[:size] = CONTENT[:size]
        checksum = xxhash.xxh3_64_intdigest(CONTENT[:size])
        for ticket, place in enumerate([0, 63, 64, size // 2, size - 65, size - 1]):
            source.bytes[place] ^= 1
            part = PART.pack(-1, CHECKED, source.address, size, memory.address, checksum)
            ring.submit(ticket, True, part, b"")
            assert statuses(arrivals) == {ticket: DAMAGED}
            source.bytes[place] ^= 1

    def test_submits__of_a_tight_loop_all_arrive_once(self, ring, arrivals, memory, descriptors):
        cancelled = set()
        for ticket in range(5_000):
            part = PART.pack(0, 0, ticket, 16, 16 * ticket, 0)
            ring.submit(ticket, ticket % 3 == 0, part, descriptors, memory.address)
            if ticket % 5 == 4 and ring.cancel(ticket - 2):
                cancelled.add(ticket - 2)
        arrived = statuses(arrivals, 5_000 - len(cancelled))
        assert not ring.cancel(4_999)
        assert arrived == dict.fromkeys(set(range(5_000)) - cancelled, ARRIVED)
        for ticket in arrived:
            assert memory.bytes[16 * ticket : 16 * ticket + 16] == CONTENT[ticket : ticket + 16]
        assert ring.running() == []

    @pytest.mark.parametrize(("parts", "files"), MALFORMED)
    def test_submit__refuses_what_is_malformed(self, ring, parts, files):
        with pytest.raises(ValueError, match="part"):
            ring.submit(0, True, parts, files)

    def test_new__refuses_what_is_malformed(self, arrivals):
        with pytest.raises(ValueError, match="needs a thread"):
            rings.FileRing(arrivals, 0)
        with pytest.raises(ValueError, match="no processor 100000"):
            rings.FileRing(arrivals, 1, cpus=[100_000])
        with pytest.raises(TypeError):
            rings.FileRing(object(), 1)


@COMPILED
class TestLife:
    def test_requests__come_first_and_cancelled_ones_never(self):
        arrivals, memory = rings.Arrivals(), Memory(64 << 20)
        part = PART.pack(-1, 0, memory.address, 32 << 20, memory.address + (32 << 20), 0)
        is_first_running = False
        while not is_first_running:  # as soon as all are there: on a busy machine not at once
            ring = rings.FileRing(arrivals, 1)
            for ticket in range(8):
                ring.submit(ticket, ticket in (0, 3, 6), part * 3 if ticket == 0 else b"", b"")
            cancelled = [ring.cancel(ticket) for ticket in (3, 5)]
            is_first_running = [ticket for ticket, _ in ring.running()] == [0]
            order = [ticket for ticket, *_ in await_arrivals(arrivals, 8 - sum(cancelled))]
            assert ring.close(WAIT_SECONDS)
        assert cancelled == [True, True]
        assert order == [0, 6, 1, 2, 4, 7]

    def test_requests__interrupt_a_transfer_that_nobody_has_requested(self):
        arrivals, memory = rings.Arrivals(), Memory(64 << 20)
        quarter = 16 << 20
        memory.bytes[:quarter] = random.Random(0).randbytes(1 << 10) * (1 << 14)
        start = memory.address
        parts = [PART.pack(-1, 0, start, quarter, start + quarter * i, 0) for i in range(1, 4)]
        order: list[int] = []
        while order != [1, 0]:  # until the request comes before its last part
            ring = rings.FileRing(arrivals, 1)
            memory.bytes[quarter:] = bytes(3 * quarter)
            ring.submit(0, False, b"".join(parts), b"")
            while not ring.running() and not arrivals.wait(0):
                pass
            ring.submit(1, True, b"", b"")
            order = [ticket for ticket, *_ in await_arrivals(arrivals, 2)]
            assert memory.bytes == bytes(memory.bytes[:quarter]) * 4
            assert ring.close(WAIT_SECONDS)

    def test_close__drops_what_has_not_begun(self):
        arrivals, memory = rings.Arrivals(), Memory(64 << 20)
        ring = rings.FileRing(arrivals, 1, memory=memory)
        part = PART.pack(-1, 0, memory.address, 32 << 20, memory.address + (32 << 20), 0)
        for ticket in range(100):
            ring.submit(ticket, True, part, b"")
        assert ring.close(WAIT_SECONDS)
        assert len(arrivals.take()) < 100
        assert ring.running() == []
        assert not ring.cancel(99)

    def test_fork__leaves_a_child_that_is_refused(self):
        arrivals = rings.Arrivals()
        ring = rings.FileRing(arrivals, 2)
        ring.submit(0, True, b"", b"")
        await_arrivals(arrivals)

        def use_both_and_then_others() -> None:
            nonlocal arrivals, ring
            for call in (
                arrivals.take,
                ring.running,
                partial(arrivals.post, 0, 0, 0.0),
                partial(arrivals.wait, 0.0),
                partial(ring.submit, 1, True, b"", b""),
                partial(ring.cancel, 1),
                partial(ring.close, 1.0),
                partial(rings.FileRing, arrivals, 1),
            ):
                with pytest.raises(RuntimeError):
                    call()
            del ring, arrivals, call
            gc.collect()
            mine = rings.Arrivals()
            another = rings.FileRing(mine, 1)
            another.submit(5, True, b"", b"")
            assert mine.wait(60.0)

        assert in_a_child(use_both_and_then_others) == 0
        ring.submit(1, True, b"", b"")
        assert statuses(arrivals) == {1: ARRIVED}

    @pytest.mark.parametrize("keeps", [True, False])
    def test_interpreter__ends_while_threads_read(self, keeps):
        code = f"""
import ctypes, struct
from runtime.transfer import rings
size = 64 << 20
memory = ctypes.create_string_buffer(2 * size)
address = ctypes.addressof(memory)
arrivals = rings.Arrivals()
ring = rings.FileRing(arrivals, 2, memory=memory)
for ticket in range(200):
    part = struct.pack("{PART.format}", -1, 0, address, size, address + size, 0)
    ring.submit(ticket, True, part, b"")
if not {keeps}:
    del ring, memory, arrivals
"""
        run_python("-c", code, timeout=WAIT_SECONDS)


class TestArrivals:
    def test_take__gives_all_in_order_and_never_waits(self, arrivals):
        assert arrivals.take() == []
        for ticket in range(10):
            arrivals.post(ticket, -ticket, 0.5 * ticket)
        assert untimed(arrivals.take()) == [(ticket, -ticket, 0.5 * ticket) for ticket in range(10)]
        assert arrivals.take() == []
        arrivals.post(2**40, 5, 0.0)
        assert arrivals.wait(0.0)
        assert untimed(arrivals.take()) == [(2**40, 5, 0.0)]

    def test_wait__ends_with_the_first_arrival_or_in_time(self, arrivals):
        assert not arrivals.wait(0.0)
        assert not arrivals.wait(-1.0)
        start = time.monotonic()
        assert not arrivals.wait(0.15)
        assert time.monotonic() - start >= 0.14
        timer = threading.Timer(0.05, arrivals.post, (1, 0, 0.0))
        timer.start()
        assert arrivals.wait(float("inf"))
        timer.join()
        assert untimed(arrivals.take()) == [(1, 0, 0.0)]

    def test_post__from_many_threads_loses_nothing(self, arrivals):

        def post(number: int) -> None:
            for i in range(2_000):
                arrivals.post(number * 2_000 + i, 0, 0.0)

        with ThreadPoolExecutor(4) as pool:
            pool.map(post, range(4))
            tickets = [ticket for ticket, *_ in await_arrivals(arrivals, 8_000)]
        assert sorted(tickets) == list(range(8_000))
        for number in range(4):
            mine = [ticket for ticket in tickets if ticket // 2_000 == number]
            assert mine == sorted(mine)

    def test_wait__is_ended_by_an_interrupt(self, arrivals):
        before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(KeyboardInterrupt):
                arrivals.wait(WAIT_SECONDS)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        arrivals.post(3, 0, 0.0)
        assert untimed(arrivals.take()) == [(3, 0, 0.0)]
