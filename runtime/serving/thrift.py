"""A server that runs for days holds what it needs now, not what it needed once."""

import time
from collections.abc import Callable

from runtime.memory import return_free_heap
from runtime.serving.choice import Choice
from runtime.serving.observer import Observer

EVERY_SECONDS = 30.0
"""Rare enough that the milliseconds which it takes do not count."""

IDLE_SECONDS = 1.0
"""Where short requests follow each other, each leaves the server idle for a moment."""


class Thrift(Observer):
    """Returns free heap now and then, between two steps, and when nothing is generated any more:
    what a step needed is free by then."""

    def __init__(
        self,
        *,
        every_seconds: float = EVERY_SECONDS,
        release: Callable[[], None] = return_free_heap,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._every, self._release, self._clock = every_seconds, release, clock
        self._last = clock()
        self._running = 0

    def started(self, choice: Choice) -> None:  # noqa: ARG002
        self._running += 1

    def stepped(self, seconds: float, choices: list[Choice]) -> None:  # noqa: ARG002
        self._release_after(self._every)

    def ended(self, choice: Choice) -> None:
        if choice.started_at is None:
            return  # it only waited; told by whoever cancelled it
        self._running -= 1
        if not self._running:
            self._release_after(IDLE_SECONDS)

    def _release_after(self, seconds: float) -> None:
        now = self._clock()
        if now - self._last >= seconds:
            self._release()
            self._last = now
