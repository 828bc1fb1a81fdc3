"""Measures of a live run: which of link and computation is busy, and reads of experts."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.klotski.rows import ReadsPerStep, SteadyShares
from runtime.policy.eviction.base import Expert
from runtime.policy.tier import TransferTask
from runtime.profiling.local import Spans

Span = tuple[float, float]


@dataclass
class ExpertSpans(Spans):
    """Spans with the expert that was moved."""

    moved: list[tuple[Expert, int, float, float]] = field(default_factory=list)
    """Expert, bytes, start, end."""

    def transferred(
        self, link: str, task: TransferTask, start: float, end: float, *, track: str
    ) -> None:
        del link, track
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
