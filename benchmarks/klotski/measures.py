"""Measures of a live run: which of link and computation is busy, reads of experts, memory."""

import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import psutil
from transformers import PreTrainedModel

from benchmarks.klotski.rows import LayerTimeline, ReadsPerStep, SteadyShares
from runtime.policy.eviction.protocol import Expert
from runtime.policy.tier import TransferTask
from runtime.profiling.spans import Spans

SAMPLE_SECONDS = 0.02
Span = tuple[float, float]


@dataclass
class ExpertSpans(Spans):
    """Spans with the expert that was computed or moved."""

    computations: list[tuple[Expert, float, float]] = field(default_factory=list)
    moved: list[tuple[Expert, int, float, float]] = field(default_factory=list)
    """Expert, bytes, start, end."""

    def computed(self, expert: Expert, start: float, end: float) -> None:
        super().computed(expert, start, end)
        self.computations.append((expert, start, end))

    def transferred(
        self, link: str, task: TransferTask, start: float, end: float, *, track: str
    ) -> None:
        super().transferred(link, task, start, end, track=track)
        self.moved.append((task.expert, task.num_bytes, start, end))


def covered_seconds(spans: Sequence[Span], window: Span) -> float:
    """Returns the seconds of the window that at least one span covers."""
    begin, end = window
    total, reached = 0.0, begin
    for start, stop in sorted(spans):
        start, stop = max(start, reached), min(stop, end)
        if stop > start:
            total += stop - start
            reached = stop
    return total


def measure_shares(spans: ExpertSpans) -> SteadyShares:
    """Measures the decode steps: all but the first, which has the prompts."""
    steps = spans.steps[1:]
    window = steps[0][0], steps[-1][1]
    seconds = window[1] - window[0]
    link = [(start, end) for _, _, start, end in spans.moved]
    num_bytes = sum(size for _, size, start, _ in spans.moved if window[0] <= start < window[1])
    idle = seconds - covered_seconds([*link, *busy_spans(spans, window)], window)
    return SteadyShares(
        seconds=seconds,
        link=covered_seconds(link, window) / seconds,
        compute=1 - covered_seconds(spans.stalls, window) / seconds,
        both_idle=idle / seconds,
        bytes_per_second=num_bytes / seconds,
    )


def busy_spans(spans: ExpertSpans, window: Span) -> list[Span]:
    """Returns the spans in which the computation does not wait for bytes."""
    busy, since = [], window[0]
    for start, end in sorted(spans.stalls):
        if end <= window[0] or start >= window[1]:
            continue
        busy.append((since, start))
        since = end
    return [*busy, (since, window[1])]


def measure_reads(spans: ExpertSpans) -> ReadsPerStep:
    """Counts the reads of each expert within each step."""
    counts: list[int] = []
    for begin, end in spans.steps:
        step = Counter(expert for expert, _, start, _ in spans.moved if begin <= start < end)
        counts += step.values()
    return ReadsPerStep(most=max(counts, default=0), mean=sum(counts) / max(1, len(counts)))


def cut_timeline(spans: ExpertSpans, *, layers: Sequence[int]) -> LayerTimeline | None:
    """Cuts some layers out of the last step but one; None if they are not in it."""
    begin, end = spans.steps[-2] if len(spans.steps) > 1 else spans.steps[-1]
    starts = [start for layer, start, _ in spans.layers if begin <= start < end and layer in layers]
    if not starts:
        return None
    zero = min(starts)
    last = max(
        (stop for (layer, _), start, stop in spans.computations
         if begin <= start < end and layer in layers),
        default=zero,
    )  # fmt: skip

    def cut(pairs: Sequence[Span]) -> list[Span]:
        return [
            (round(1000 * (max(a, zero) - zero), 2), round(1000 * (min(b, last) - zero), 2))
            for a, b in pairs
            if b > zero and a < last
        ]

    return LayerTimeline(
        layers=list(layers),
        milliseconds=round(1000 * (last - zero), 2),
        other_layers=cut([(a, b) for _, a, b in spans.layers]),
        experts=cut([(a, b) for _, a, b in spans.computations]),
        stalls=cut(spans.stalls),
        transfers=cut([(a, b) for _, _, a, b in spans.moved]),
    )


class MemorySampler:
    """Samples the process's memory and the arena during a run, on a thread."""

    def __init__(self, model: PreTrainedModel):
        self._engine = model.moecast.engine
        self._process = psutil.Process()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.samples: list[tuple[float, int, int]] = []
        """Seconds, resident bytes, experts in the arena."""

    def _run(self) -> None:
        start = time.perf_counter()
        while not self._ends.wait(SAMPLE_SECONDS):
            self.samples.append(
                (
                    round(time.perf_counter() - start, 3),
                    self._process.memory_info().rss,
                    len(self._engine.cache.top.cache.entries),
                )
            )

    def __enter__(self) -> "MemorySampler":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def thin(self, most: int = 200) -> list[tuple[float, int, int]]:
        """Returns at most that many samples, evenly spaced."""
        step = max(1, -(-len(self.samples) // most))
        return self.samples[::step]
