"""Measures reads of experts: single, two at once, and during a computation."""

import math
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from runtime.store.base import ExpertStore, max_slot_bytes

READS = 25
"""Reads of a chunk, of an expert, and of two chunks at once."""
TRIMMED = 0.04
"""Share of the slowest reads that is ignored. The mean of the others is used, not the median,
because a token waits for a dozen reads."""

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
    """Reads random experts of the store, one after another, each once before any repeats."""

    def __init__(self, store: ExpertStore, *, first: int = 0):
        self._store = store
        self._slot = torch.empty(max_slot_bytes(store), dtype=torch.uint8)
        self._slot.zero_()  # touch its pages, as an arena's have been
        self._num_experts = store.num_layers * store.num_experts
        self._place = first
        self._stride = round(GOLDEN * self._num_experts)
        while math.gcd(self._stride, self._num_experts) != 1:
            self._stride += 1
        self.sizes = tuple(store.layouts[0].chunk_bytes)
        self._smallest = self.sizes.index(min(self.sizes))

    def _read(self, chunks: range) -> None:
        store = self._store
        self._place = (self._place + self._stride) % self._num_experts
        layer, expert = divmod(self._place, store.num_experts)
        # Layers may have fewer than the most.
        store.read(layer, expert % store.experts_per_layer[layer], chunks, self._slot)

    def chunk(self) -> None:
        """Read one chunk, the smallest."""
        self._read(range(self._smallest, self._smallest + 1))

    def expert(self) -> None:
        self._read(range(len(self.sizes)))


@dataclass(frozen=True)
class Reads:
    """Times of this machine's reads, in seconds."""

    fixed: float
    """Seconds per transfer, independent of its size."""
    per_byte: float
    speed_together: float
    """Speed of each of two reads at a time against one."""


class BackgroundReads:
    """A context in which another thread reads chunk after chunk; their times afterwards."""

    def __init__(self, reader: ProbeReader):
        self.times: list[float] = []
        self._reader = reader
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="moecast reads", daemon=True)

    def _run(self) -> None:
        while not self._is_over.is_set():
            self.times.append(seconds(self._reader.chunk))

    def __enter__(self) -> "BackgroundReads":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()


def measure_reads(store: ExpertStore) -> Reads:
    """Measure reads as the runtime does them; takes about 150 reads.

    Raises:
        TransferError: the store cannot be read.
    """
    reader = ProbeReader(store)
    size = min(reader.sizes)
    # In turns, so that what else the disk is doing falls on both alike.
    pairs = [(seconds(reader.chunk), seconds(reader.expert)) for _ in range(READS)]
    chunk, whole = (trimmed_mean(list(times)) for times in zip(*pairs, strict=True))
    with BackgroundReads(ProbeReader(store, first=store.num_experts // 2)):
        together = [seconds(reader.chunk) for _ in range(READS)]
    alone = [seconds(reader.chunk) for _ in range(READS)]
    # Whole experts minus one chunk leave the marginal cost; what a chunk costs beyond is fixed.
    rest = sum(reader.sizes) - size
    per_byte = max(0.0, whole - chunk) / rest if rest else chunk / size
    return Reads(
        fixed=max(0.0, chunk - per_byte * size),
        per_byte=per_byte,
        speed_together=min(1.0, trimmed_mean(alone) / trimmed_mean(together)),
    )
