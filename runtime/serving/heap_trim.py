"""Returns freed heap memory to the operating system when the server is idle."""

import time
from collections.abc import Callable

from runtime.engine.memory import return_free_heap
from runtime.serving.choice import CompletionChoice
from runtime.serving.service import ServiceObserver

TRIM_INTERVAL_SECONDS = 30.0
"""Long enough that the milliseconds of one trim do not matter."""


class HeapTrimmer(ServiceObserver):
    """Trims the heap when the server becomes idle, and at intervals between two steps.

    When the server is idle, everything that its last answers needed has been freed.
    """

    def __init__(
        self,
        *,
        interval_seconds: float = TRIM_INTERVAL_SECONDS,
        trim: Callable[[], None] = return_free_heap,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._interval, self._trim_heap, self._clock = interval_seconds, trim, clock
        self._last_trim = clock()

    def on_step(self, seconds: float, choices: list[CompletionChoice]) -> None:  # noqa: ARG002
        if self._clock() - self._last_trim >= self._interval:
            self._trim()

    def on_idle(self) -> None:
        self._trim()

    def _trim(self) -> None:
        self._trim_heap()
        self._last_trim = self._clock()
