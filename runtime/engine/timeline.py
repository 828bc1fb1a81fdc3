"""Writes a timeline as a Chrome trace, for ui.perfetto.dev and chrome://tracing."""

import json
import os
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from predictors.errors import MoecastError
from runtime.policy.eviction.base import Expert
from runtime.policy.tier import TransferTask

PROCESS = 1
FLUSH_EVENTS = 20_000
"""Events in memory at most; about 3 MB of JSON."""
COMPUTE, PREDICTOR = "compute", "predictor"


def open_partial(path: Path, partial: Path) -> TextIO:
    """Opens the file that is renamed to `path` at the end.

    Raises:
        MoecastError: either exists and is no regular file, such as a device, or cannot be written.
    """
    try:
        for existing in (path, partial):
            if os.path.lexists(existing) and not stat.S_ISREG(existing.lstat().st_mode):
                raise MoecastError(
                    f"trace_events={path}: {existing} is not a regular file; give another path"
                )
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(
            partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644
        )
        return os.fdopen(handle, "w", encoding="utf-8")
    except OSError as error:
        raise MoecastError(f"trace_events={path}: {error.strerror}; give another path") from error


@contextmanager
def explain_full_disk(path: Path) -> Iterator[None]:
    """Raises MoecastError in place of an OSError that does not say which file it is of."""
    try:
        yield
    except OSError as error:
        raise MoecastError(
            f"trace_events={path}: {error.strerror}; free space, give another path or leave it out"
        ) from error


class ChromeTraceWriter:
    """Writes spans of computation, stalls, predictions and transfers, one track for each.

    Flow arrows lead from a prefetch to the first use of its expert; counters show bytes moved.
    Thread-safe. Events go to `PATH.partial`, which is renamed to `path` when complete.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        if not self.path.name:
            raise MoecastError(f"trace_events={path}: it names no file; give a file's path")
        self._partial = self.path.with_name(self.path.name + ".partial")
        self._file = open_partial(self.path, self._partial)
        self._file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        self._lock = threading.Lock()
        self._start = time.perf_counter()
        self._events: list[dict[str, Any]] = []
        self._is_first = True
        self._tracks: dict[str, int] = {}
        self._moved: dict[str, int] = {}
        self._arrived: dict[Expert, int] = {}
        """Flow number of the prefetch of each expert that has not been used since."""
        self._num_flows = 0
        self._closed = False
        self._add("M", name="process_name", args={"name": "moecast"})
        for track in (COMPUTE, PREDICTOR):
            self._track(track)

    def _microseconds(self, seconds: float) -> float:
        return round((seconds - self._start) * 1e6, 1)

    def _track(self, name: str) -> int:
        if name not in self._tracks:
            self._tracks[name] = len(self._tracks) + 1
            self._add("M", tid=self._tracks[name], name="thread_name", args={"name": name})
        return self._tracks[name]

    def _add(self, phase: str, **fields: Any) -> None:
        self._events.append({"ph": phase, "pid": PROCESS, **fields})

    def _add_span(self, track: str, name: str, start: float, end: float, **details: Any) -> None:
        self._add(
            "X",
            tid=self._track(track),
            name=name,
            cat=name.split()[0],
            ts=self._microseconds(start),
            dur=max(0.0, round((end - start) * 1e6, 1)),
            args=details,
        )
        if len(self._events) >= FLUSH_EVENTS:
            self._flush()

    def _span(self, track: str, name: str, start: float, end: float, **details: Any) -> None:
        with self._lock:
            if not self._closed:
                self._add_span(track, name, start, end, **details)

    # ---- `TimelineSink`

    def transferred(
        self, link: str, task: TransferTask, start: float, end: float, *, track: str
    ) -> None:
        layer, expert = task.expert
        with self._lock:
            if self._closed:
                return
            self._add_span(
                track,
                "fetch" if task.high else "prefetch",
                start,
                end,
                layer=layer,
                expert=expert,
                chunks=[task.first_chunk, task.end_chunk],
                bytes=task.num_bytes,
            )
            self._moved[link] = self._moved.get(link, 0) + task.num_bytes
            moved = {"bytes": self._moved[link]}
            self._add("C", name=f"bytes moved, {link}", ts=self._microseconds(end), args=moved)
            if not task.high and task.expert not in self._arrived:
                self._num_flows += 1
                self._arrived[task.expert] = self._num_flows
                self._flow("s", self._num_flows, track, start)

    def _flow(self, phase: str, number: int, track: str, when: float, **fields: str) -> None:
        self._add(
            phase,
            tid=self._track(track),
            id=number,
            name="prefetched for",
            cat="flow",
            ts=self._microseconds(when),
            **fields,
        )

    def computed(self, expert: Expert, start: float, end: float) -> None:
        """Record the computation of an expert (on a device: the launch of its kernels)."""
        with self._lock:
            if self._closed:
                return
            self._add_span(COMPUTE, "expert", start, end, layer=expert[0], expert=expert[1])
            number = self._arrived.pop(expert, None)
            if number is not None:
                self._flow("f", number, COMPUTE, start, bp="e")

    def stalled(self, layer: int, start: float, end: float) -> None:
        self._span(COMPUTE, "stall", start, end, layer=layer)

    def computed_dense(self, layer: int, start: float, end: float) -> None:
        """Record time outside routed experts, up to the router of `layer`."""
        self._span(COMPUTE, "other layers", start, end, layer=layer)

    def predicted(self, event: str, layer: int, start: float, end: float) -> None:
        self._span(PREDICTOR, "predict", start, end, layer=layer, on=event)

    def step(self, num_tokens: int, start: float, end: float) -> None:
        name = "prefill" if num_tokens > 1 else "decode"
        self._span("step", name, start, end, tokens=num_tokens)

    # ---- the file

    def _flush(self) -> None:
        with explain_full_disk(self.path):
            for event in self._events:
                self._file.write(("" if self._is_first else ",\n") + json.dumps(event))
                self._is_first = False
        self._events.clear()

    def close(self) -> None:
        """Complete the file. May be called twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            with explain_full_disk(self.path), self._file:
                self._flush()
                self._file.write("\n]}\n")
                self._file.flush()
                os.fsync(self._file.fileno())
                self._partial.replace(self.path)
