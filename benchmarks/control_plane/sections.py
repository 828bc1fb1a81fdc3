"""Divides the time of a step on the model's thread among the parts of the control plane.

The interpreter reports every call and return (`sys.setprofile`). Time belongs to the section of the
innermost function that has one, by the file that it is in: what a part of moecast calls in NumPy,
PyTorch or onnxruntime is that part's, and the hooks that a layer calls are not the layer's. So
sections add up to the step, and functions may move or change their names.
"""

import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from runtime.transfer.watched_loop import WatchedLoop

ROOT = Path(__file__).resolve().parents[2]

MODEL = "model"
"""Everything that has no section: Transformers and PyTorch, which plain Transformers has too."""

SECTIONS: Mapping[str, tuple[str, ...]] = {
    "probes": ("runtime/hf/probes.py", "runtime/hf/layers.py"),
    "experts function": ("runtime/hf/experts.py",),
    "engine": ("runtime/engine/",),
    "forecast": ("predictors/", "runtime/engine/predictor_guard.py"),
    "planning": ("runtime/policy/forecast_scheduler.py", "runtime/policy/queue.py"),
    "requests": ("runtime/policy/",),
    "eviction": ("runtime/policy/eviction/", "runtime/policy/cache.py"),
    "transfers": ("runtime/transfer/", "runtime/store/"),
    "waits": (),
}
"""Beginnings of the paths of each section's files; the longest that fits decides."""

WAITING = WatchedLoop.wait.__code__
"""The function in which the model waits for experts."""

COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>")
"""Calls of functions up to Python 3.11, none later: they are not counted."""

CALIBRATION_CALLS = 20_000


def find_section(code: CodeType) -> str | None:
    """Return the section of a function; None: its time is its caller's."""
    if code is WAITING:
        return "waits"
    path = own_path(code)
    fitting = [
        (len(start), section)
        for section, starts in SECTIONS.items()
        for start in starts
        if path.startswith(start)
    ]
    return max(fitting)[1] if fitting else None


def own_path(code: CodeType) -> str:
    """Return the path of a function's file in this project; empty outside of it."""
    path = Path(code.co_filename)
    # An environment may lie within the project's folder.
    if not path.is_relative_to(ROOT) or "site-packages" in path.parts:
        return ""
    return path.relative_to(ROOT).as_posix()


class StepProfiler:
    """Measures sections and counts calls on this thread; a context manager, which may be reentered.

    Args:
        extra: sections of functions that belong to none by their file.
    """

    def __init__(self, extra: Mapping[CodeType, str] | None = None):
        self._seconds = dict.fromkeys((*SECTIONS, MODEL), 0.0)
        self._events = dict.fromkeys((*SECTIONS, MODEL), 0)
        self._calls: Counter[CodeType] = Counter()
        self._sections: dict[CodeType, str | None] = dict(extra or {})

    def __enter__(self) -> "StepProfiler":
        sys.setprofile(self._make_handler())
        return self

    def __exit__(self, *exc_info: object) -> None:
        sys.setprofile(None)

    def _make_handler(self) -> Callable[[FrameType, str, Any], None]:
        """Return a function that counts the time since the last event for the running section.

        Its own time is nobody's: it looks at the clock first and last. Variables of a closure are
        the fastest that there are.
        """
        clock = time.perf_counter
        seconds, events, calls, sections = self._seconds, self._events, self._calls, self._sections
        running: list[str] = []
        section, last = MODEL, clock()

        def handle(frame: FrameType, event: str, _arg: Any) -> None:
            nonlocal section, last
            now = clock()
            seconds[section] += now - last
            events[section] += 1
            if event == "call":
                code = frame.f_code
                running.append(section)
                calls[code] += 1
                if code not in sections:
                    sections[code] = find_section(code)
                section = sections[code] or section
            elif event == "return" and running:
                section = running.pop()
            last = clock()

        return handle

    def take_seconds(self, event_seconds: float) -> dict[str, float]:
        """Return each section's time since the last call, less that of reporting its events."""
        taken = {
            section: max(0.0, seconds - event_seconds * self._events[section])
            for section, seconds in self._seconds.items()
        }
        self._seconds.update(dict.fromkeys(self._seconds, 0.0))
        self._events.update(dict.fromkeys(self._events, 0))
        return taken

    def calls(self) -> dict[str, int]:
        """Return the calls of runtime's and predictors' functions, by their file."""
        by_file: Counter[str] = Counter()
        for code, number in self._calls.items():
            path = own_path(code)
            if path.startswith(("runtime/", "predictors/")) and code.co_name not in COMPREHENSIONS:
                by_file[path] += number
        return dict(sorted(by_file.items()))


def measure_event() -> float:
    """Return the time that the report of an event adds to the section that it is reported in."""

    def run_calls() -> None:
        for _ in range(CALIBRATION_CALLS):
            _do_nothing()

    start = time.perf_counter()
    run_calls()
    alone = time.perf_counter() - start
    profiler = StepProfiler()
    with profiler:
        run_calls()
    return max(0.0, (sum(profiler.take_seconds(0.0).values()) - alone) / (2 * CALIBRATION_CALLS))


def _do_nothing() -> None: ...
