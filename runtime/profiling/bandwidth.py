"""Measures bandwidth: of the model's files, of memory, and of links to GPUs."""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch

from runtime.accelerator import list_accelerators, open_accelerator, synchronize
from runtime.config import PageCache
from runtime.store.base import allocate_aligned, as_memoryview
from runtime.store.files import FileReader
from runtime.store.layout import ALIGNMENT

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
            blocks = range(room // size + 1)
            chosen = random.sample(blocks, min(MOST_READS, len(blocks)))
            offsets = [block * size for block in chosen]
            drop(file)
            row["direct"], _ = time_reads(file, offsets, size, PageCache.BYPASS)
            drop(file)
            row["cold"], done = time_reads(file, offsets, size, PageCache.KEEP)
            row["cached"], _ = time_reads(file, offsets[:done], size, PageCache.KEEP)
            drop(file)
        rows.append(row)
    return rows


def time_reads(
    file: Path, offsets: Sequence[int], size: int, page_cache: PageCache
) -> tuple[float, int]:
    """Bytes a second, and how many of the reads were done before the time was up."""
    reader = FileReader(page_cache=page_cache)
    target = as_memoryview(allocate_aligned(size, ALIGNMENT))
    done = 0
    started = time.perf_counter()
    try:
        for offset in offsets:
            reader.read(file, offset, target, what="a measurement")
            done += 1
            if time.perf_counter() - started > CELL_SECONDS:
                break
        seconds = time.perf_counter() - started
    finally:
        reader.close()
    return done * size / seconds, done


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
    times = []
    for _ in range(COPIES):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)
