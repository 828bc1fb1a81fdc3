"""Measures bandwidth of the model's files, memory and links to GPUs, and reads of experts.

Experts are read one at a time, two at once, and during a computation.
"""

import math
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch

from runtime.accelerator import list_accelerators, open_accelerator, synchronize
from runtime.config import PageCache
from runtime.policy.tier import TransferTask
from runtime.store.base import ExpertStore, as_memoryview
from runtime.store.files import FileRange, FileReader
from runtime.store.layout import ExpertLayout
from runtime.transfer.arena import Arena
from runtime.transfer.file_ring import STORE_THREADS, StoreRing
from runtime.transfer.ring import FAILED
from runtime.transfer.thread_ring import make_arrivals

READ_BYTES = (4 << 10, 64 << 10, 1 << 20, 8 << 20)
CELL_SECONDS = 0.4
"""Time for each way and size: enough for a few reads of a slow disk."""
MOST_READS = 200
COPY_BYTES = 64 << 20
"""Above every cache."""
COPIES = 5


def measure_disk_bandwidth(files: Sequence[Path], *, seed: int) -> list[dict[str, Any]]:
    """Measure random reads of the files in bytes per second, by way and size.

    `direct`: as the runtime reads, past the page cache (small reads: dropped behind). `cold`:
    through the page cache after its pages were dropped. `cached`: the same bytes again. A way is
    null where the file is smaller than the read.
    """
    rows = []
    random = Random(seed)
    for size in READ_BYTES:
        places = [(file, file.stat().st_size - size) for file in files]
        places = [(file, room) for file, room in places if room >= 0]
        row: dict[str, Any] = {"read_bytes": size, "direct": None, "cold": None, "cached": None}
        if places:
            file, room = random.choices(places, weights=[room + 1 for _, room in places])[0]
            # Each block once: one that was read before would not be cold.
            num_blocks = room // size + 1
            first, most = random.randrange(num_blocks), min(MOST_READS, num_blocks)
            drop(file)
            row["direct"], _ = time_reads(FileBlocks(file, size), first=first, most=most)
            blocks = FileBlocks(file, size, PageCache.KEEP)
            drop(file)
            row["cold"], done = time_reads(blocks, first=first, most=most)
            row["cached"], _ = time_reads(blocks, first=first, most=done)
            drop(file)
        rows.append(row)
    return rows


class FileBlocks(ExpertStore):
    """A file's blocks of one size as experts of one layer, for a ring to read."""

    scratch_bytes = 0

    def __init__(self, file: Path, size: int, page_cache: PageCache = PageCache.BYPASS):
        self._file, self._size = file, size
        self.files = FileReader(page_cache=page_cache)
        self.layouts = [ExpertLayout(shapes={}, dtypes={}, chunks=(), ends=(size,))]
        self.experts_per_layer = [file.stat().st_size // size]

    def read(self, layer: int, expert: int, chunks: range, slot: torch.Tensor) -> None:  # noqa: ARG002
        place = expert * self._size
        self.files.read(self._file, place, as_memoryview(slot), what="a measurement")

    def extents(self, layer: int, expert: int) -> list[FileRange]:  # noqa: ARG002
        return [FileRange(self._file, expert * self._size)]


def time_reads(store: ExpertStore, *, first: int, most: int) -> tuple[float, int]:
    """Read experts by a ring, several at once, as while serving.

    Returns bytes a second, and how many of the reads were done before the time was up.
    """
    with store.files, ProbeReader(store, first=first, num_threads=STORE_THREADS) as reader:
        started = time.perf_counter()
        for _ in range(most):
            reader.begin()
        done, taken = 0, 0.0
        while done < most and taken <= CELL_SECONDS:
            done += len(reader.wait())
            taken = time.perf_counter() - started
        return done * sum(reader.sizes) / taken, done


def drop(file: Path) -> None:
    """Drop the file's pages from the page cache; where that is impossible, `cold` is not cold."""
    if not hasattr(os, "posix_fadvise"):
        return
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def measure_memory_bandwidth() -> float:
    """Bytes read and written a second by a copy on the CPU."""
    source = torch.ones(COPY_BYTES, dtype=torch.uint8)
    target = torch.zeros(COPY_BYTES, dtype=torch.uint8)
    return 2 * COPY_BYTES / time_best(lambda: target.copy_(source))


def measure_link_bandwidth() -> list[float]:
    """Bytes a second from pinned memory to each accelerator."""
    bandwidths = []
    for device in list_accelerators():
        accelerator = open_accelerator(device)
        assert accelerator is not None
        source = torch.ones(COPY_BYTES, dtype=torch.uint8, pin_memory=accelerator.pins_memory)
        target = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)

        def copy(target: torch.Tensor = target, source: torch.Tensor = source) -> None:
            target.copy_(source)
            synchronize(target.device)

        bandwidths.append(COPY_BYTES / time_best(copy))
    return bandwidths


def time_best(run: Callable[[], object]) -> float:
    """Return the shortest time of a few runs, the one least disturbed by other processes."""
    return min(seconds(run) for _ in range(COPIES))


READS = 25
"""Reads of a chunk, of an expert, and of two chunks at once."""
TRIMMED = 0.04
"""Share of the slowest reads that is ignored. The mean of the others is used, not the median,
because a token waits for a dozen reads."""

CLOSE_SECONDS = 5.0
"""Time for a read that has begun to end."""
BACKLOG = 1000
"""Reads that are begun ahead: more than a step of a model takes."""
GOLDEN = 0.618
"""Strides of this share of a circle come near no place again for long."""


def trimmed_mean(times: list[float]) -> float:
    """Mean of the times, in their unit, without the slowest few."""
    assert times
    kept = sorted(times)[: max(1, len(times) - round(TRIMMED * len(times)))]
    return statistics.fmean(kept)


def seconds(run: Callable[[], object]) -> float:
    """Return how long a call takes."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


class ProbeReader:
    """Reads random experts of the store, one after another, each once before any repeats.

    Rings read them, as while serving: compiled threads, and one read where an expert's parts lie
    together. A context manager, which ends the rings.

    Args:
        num_threads: reads at once. Each thread has a ring and a slot of its own: two reads into one
            slot would damage each other's bytes, which a packed store notices.
    """

    def __init__(self, store: ExpertStore, *, first: int = 0, num_threads: int = 1):
        self._store = store
        self._arrivals = make_arrivals()
        arena = Arena(store.layouts, num_threads)
        for slot in range(num_threads):
            arena.slot(slot).zero_()  # touch its pages, as an arena's have been
        self._rings = [
            StoreRing(self._arrivals, store, arena, num_threads=1, closes=False)
            for _ in range(num_threads)
        ]
        self._num_reads = 0
        self._num_running = 0
        """Reads that were begun and not taken yet."""
        self._num_experts = store.num_layers * store.num_experts
        self._place = first
        self._stride = round(GOLDEN * self._num_experts)
        while math.gcd(self._stride, self._num_experts) != 1:
            self._stride += 1
        self.sizes = tuple(store.layouts[0].chunk_bytes)
        self._smallest = self.sizes.index(min(self.sizes))

    def _begin(self, first_chunk: int, end_chunk: int) -> None:
        self._place = (self._place + self._stride) % self._num_experts
        layer, expert = divmod(self._place, self._store.num_experts)
        slot = self._num_reads % len(self._rings)
        task = TransferTask(
            # Layers may have fewer than the most.
            expert=(layer, expert % self._store.experts_per_layer[layer]),
            slot=slot,
            first_chunk=first_chunk,
            end_chunk=end_chunk,
            num_bytes=sum(self._store.layouts[layer].chunk_bytes[first_chunk:end_chunk]),
            high=True,
            source_slot=None,
        )
        self._rings[slot].submit(self._num_reads, task)
        self._num_reads += 1
        self._num_running += 1

    def _take(self) -> list[float]:
        times = []
        for ticket, status, taken, _ in self._arrivals.take():
            ring = self._rings[ticket % len(self._rings)]
            if ring.settle(ticket, status):
                self._num_running -= 1
                if status == FAILED:
                    raise ring.errors.pop(ticket)
                times.append(taken)
        return times

    def wait(self) -> list[float]:
        """Wait until a read has ended; returns the threads' seconds of those that have."""
        while not (times := self._take()):
            self._arrivals.wait(threading.TIMEOUT_MAX)
        return times

    def keep_busy(self) -> list[float]:
        """Begin to read as many chunks as a thread does not end soon, while Python computes.

        Returns the threads' seconds of those that have ended since; raises TransferError.
        """
        times = self._take()
        while self._num_running < BACKLOG:
            self._begin(self._smallest, self._smallest + 1)
        return times

    def chunk(self) -> float:
        """Read one chunk, the smallest; returns the seconds of its thread. Raises TransferError."""
        self._begin(self._smallest, self._smallest + 1)
        return self.wait()[0]

    def begin(self) -> None:
        """Begin to read an expert."""
        self._begin(0, len(self.sizes))

    def expert(self) -> float:
        """Read an expert; returns the seconds of its thread. Raises TransferError."""
        self.begin()
        return self.wait()[0]

    def close(self) -> list[float]:
        """End the reads; returns the seconds of those not returned yet. Raises TransferError."""
        for ring in self._rings:
            ring.close(CLOSE_SECONDS)
        return self._take()

    def __enter__(self) -> "ProbeReader":
        return self

    def __exit__(self, *_: object) -> None:
        for ring in self._rings:
            ring.close(CLOSE_SECONDS)


@dataclass(frozen=True)
class Reads:
    """Times of this machine's reads, in seconds."""

    chunk: float
    """Seconds of the smallest chunk on the thread that reads it."""
    fixed: float
    """Seconds per transfer, independent of its size, with the way to the thread and back."""
    per_byte: float
    speed_together: float
    """Speed of each of two reads at a time against one."""


def measure_reads(store: ExpertStore) -> Reads:
    """Measure reads as the runtime does them; takes about 150 reads.

    Raises:
        TransferError: the store cannot be read.
    """
    with ProbeReader(store) as reader:
        size = min(reader.sizes)
        # In turns, so that what else the disk is doing falls on both alike.
        pairs = [(seconds(reader.chunk), seconds(reader.expert)) for _ in range(READS)]
        chunk, whole = (trimmed_mean(list(times)) for times in zip(*pairs, strict=True))
        with ProbeReader(store, first=store.num_experts // 2) as background:
            background.keep_busy()
            together = [seconds(reader.chunk) for _ in range(READS)]
        own: list[float] = []
        alone = [seconds(lambda: own.append(reader.chunk())) for _ in range(READS)]
    # Whole experts minus one chunk leave the marginal cost; what a chunk costs beyond is fixed.
    rest = sum(reader.sizes) - size
    per_byte = max(0.0, whole - chunk) / rest if rest else chunk / size
    return Reads(
        chunk=trimmed_mean(own),
        fixed=max(0.0, chunk - per_byte * size),
        per_byte=per_byte,
        speed_together=min(1.0, trimmed_mean(alone) / trimmed_mean(together)),
    )
