"""What a live run is seen to do: which is busy when, how often an expert is read, what is held."""

import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil
from transformers import PreTrainedModel

from runtime.policy.eviction.protocol import Expert
from runtime.policy.tier import TransferTask
from runtime.profiling.spans import Spans

SAMPLE_SECONDS = 0.02
Span = tuple[float, float]


@dataclass
class Named(Spans):
    """Spans that know which expert was computed."""

    computations: list[tuple[Expert, float, float]] = field(default_factory=list)
    moved: list[tuple[Expert, bool, int, float, float]] = field(default_factory=list)
    """Expert, whether a router had asked, bytes, from, to."""

    def computed(self, expert: Expert, start: float, end: float) -> None:
        super().computed(expert, start, end)
        self.computations.append((expert, start, end))

    def transferred(
        self, link: str, task: TransferTask, start: float, end: float, *, track: str
    ) -> None:
        super().transferred(link, task, start, end, track=track)
        self.moved.append((task.expert, task.high, task.num_bytes, start, end))


def covered(spans: Sequence[Span], window: Span) -> float:
    """Seconds of the window within one span at least."""
    begin, end = window
    total, reached = 0.0, begin
    for start, stop in sorted(spans):
        start, stop = max(start, reached), min(stop, end)
        if stop > start:
            total += stop - start
            reached = stop
    return total


def steady(spans: Named) -> list[Span]:
    """Decode steps of the whole group: all but the first, which has the prompts."""
    return spans.steps[1:]


def shares(spans: Named) -> dict[str, float]:
    """Of the steady state's time: link busy, computing, and one of them at least."""
    steps = steady(spans)
    window = steps[0][0], steps[-1][1]
    seconds = window[1] - window[0]
    link = [(start, end) for _, _, _, start, end in spans.moved]
    stalled = covered(spans.stalls, window)
    idle = seconds - covered([*link, *busy(spans, window)], window)
    return {
        "seconds": seconds,
        "link": covered(link, window) / seconds,
        "compute": 1 - stalled / seconds,
        "both_idle": idle / seconds,
        "bytes_per_second": sum(
            size for _, _, size, start, _ in spans.moved if window[0] <= start < window[1]
        )
        / seconds,
    }


def busy(spans: Named, window: Span) -> list[Span]:
    """When the computation did not wait for bytes."""
    found, since = [], window[0]
    for start, end in sorted(spans.stalls):
        if end <= window[0] or start >= window[1]:
            continue
        found.append((since, start))
        since = end
    return [*found, (since, window[1])]


def reads(spans: Named) -> dict[str, Any]:
    """How often an expert is brought within one step: at most, and in the mean."""
    counts: list[int] = []
    for begin, end in spans.steps:
        step = Counter(expert for expert, _, _, start, _ in spans.moved if begin <= start < end)
        counts += step.values()
    return {"most": max(counts, default=0), "mean": sum(counts) / max(1, len(counts))}


def timeline(spans: Named, *, layers: Sequence[int]) -> dict[str, Any]:
    """Of the last but one step, some layers: spans in ms from where they begin."""
    begin, end = spans.steps[-2] if len(spans.steps) > 1 else spans.steps[-1]
    own = [
        (layer, start, stop)
        for layer, start, stop in spans.layers
        if begin <= start < end and layer in layers
    ]
    if not own:
        return {}
    zero = min(start for _, start, _ in own)
    last = max(
        (stop for (layer, _), start, stop in spans.computations
         if begin <= start < end and layer in layers),
        default=zero,
    )  # fmt: skip

    def within(pairs: Sequence[Span]) -> list[list[float]]:
        return [
            [round(1000 * (max(a, zero) - zero), 2), round(1000 * (min(b, last) - zero), 2)]
            for a, b in pairs
            if b > zero and a < last
        ]

    return {
        "layers": list(layers),
        "milliseconds": round(1000 * (last - zero), 2),
        "other layers": within([(a, b) for _, a, b in spans.layers]),
        "experts": within([(a, b) for _, a, b in spans.computations]),
        "stalls": within(spans.stalls),
        "transfers": within([(a, b) for _, _, _, a, b in spans.moved]),
    }


class Memory:
    """Samples the process's memory and what the arena holds, beside the run."""

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

    def __enter__(self) -> "Memory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def thinned(self, most: int = 200) -> list[tuple[float, int, int]]:
        """So many samples at most, evenly."""
        step = max(1, -(-len(self.samples) // most))
        return self.samples[::step]
