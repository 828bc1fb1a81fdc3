"""Read throughput of experts: in place with each page-cache setting, and packed.

One thread reads whole experts at random, the ways interleaved, with a cold page cache at the start
of each; figures are medians of the repetitions.
"""

import os
import random
import statistics
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.config import ReadsConfig
from benchmarks.reports import print_line, write_report
from runtime.config import PageCache
from runtime.hf.loading import load_stripped
from runtime.store.base import ExpertStore, allocate_aligned
from runtime.store.packed.store import open_store

REPETITIONS = 5
EXPERTS = 96


@dataclass(frozen=True, kw_only=True)
class ReadFigures:
    """Figures of one run."""

    gigabytes_per_second: float
    cpu_ms_per_expert: float
    left_in_page_cache: float
    """Cached bytes of the files after the run, relative to the bytes read."""


@dataclass(frozen=True, kw_only=True)
class ReadsRow(ReadFigures):
    """Medians of one way to read."""

    way: str
    all_gigabytes_per_second: list[float]


@dataclass(frozen=True, kw_only=True)
class ReadsReport:
    expert_bytes: int
    experts_read: int
    repetitions: int
    load_average_at_end: float
    rows: list[ReadsRow]


def drop_cached(folder: Path) -> None:
    """Drops the folder's files from the page cache."""
    for file in folder.iterdir():
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached_bytes(folder: Path) -> int:
    """Returns the bytes of the folder's files in the page cache, by util-linux' fincore."""
    command = ["fincore", "--noheadings", "--bytes", "--output", "RES", *map(str, folder.iterdir())]
    return sum(map(int, subprocess.check_output(command, text=True).split()))


def measure(store: ExpertStore, folder: Path, *, seed: int) -> ReadFigures:
    """Reads experts at random into one slot."""
    drop_cached(folder)
    experts = [(i, e) for i, n in enumerate(store.experts_per_layer) for e in range(n)]
    chosen = random.Random(seed).sample(experts, EXPERTS)
    slot = allocate_aligned(max(layout.num_bytes for layout in store.layouts))
    started, cpu_started = time.perf_counter(), time.process_time()
    num_bytes = 0
    for layer, expert in chosen:
        chunk_bytes = store.layouts[layer].chunk_bytes
        store.read(layer, expert, range(len(chunk_bytes)), slot)
        num_bytes += sum(chunk_bytes)
    seconds = time.perf_counter() - started
    return ReadFigures(
        gigabytes_per_second=num_bytes / seconds / 1e9,
        cpu_ms_per_expert=1000 * (time.process_time() - cpu_started) / EXPERTS,
        left_in_page_cache=cached_bytes(folder) / num_bytes,
    )


def run_reads(config: ReadsConfig) -> None:
    stripped = load_stripped(config.model, "auto")
    ways: dict[str, tuple[ExpertStore, Path]] = {}
    for page_cache in PageCache:
        in_place = stripped.open_store(page_cache=page_cache)
        ways[f"in place, page_cache={page_cache}"] = in_place, config.model
    for page_cache in (PageCache.BYPASS, PageCache.DROP):
        packed = open_store(config.store, None, page_cache=page_cache)
        ways[f"packed, page_cache={page_cache}"] = packed, config.store
    runs: dict[str, list[ReadFigures]] = {way: [] for way in ways}
    for repetition in range(REPETITIONS):
        for way, (store, folder) in ways.items():
            runs[way].append(measure(store, folder, seed=config.seed + repetition))
    rows = []
    for way, figures in runs.items():
        speeds = [run.gigabytes_per_second for run in figures]
        rows.append(
            ReadsRow(
                way=way,
                gigabytes_per_second=statistics.median(speeds),
                cpu_ms_per_expert=statistics.median(run.cpu_ms_per_expert for run in figures),
                left_in_page_cache=statistics.median(run.left_in_page_cache for run in figures),
                all_gigabytes_per_second=speeds,
            )
        )
        print_line(str(rows[-1]))
    report = ReadsReport(
        expert_bytes=ways["in place, page_cache=bypass"][0].layouts[0].num_bytes,
        experts_read=EXPERTS,
        repetitions=REPETITIONS,
        load_average_at_end=os.getloadavg()[0],
        rows=rows,
    )
    write_report(config, report)
