"""A server that runs for days holds what it needs now, not what it needed once."""

import time
from collections.abc import Callable

from runtime.engine.memory import return_free_heap
from runtime.serving.choice import Choice
from runtime.serving.observer import Observer

EVERY_SECONDS = 30.0
"""Rare enough that the milliseconds which it takes do not count."""


class Thrift(Observer):
    """Returns free heap now and then, between two steps, and whenever the server rests: by then
    everything that its last answers needed is free.
    """

    def __init__(
        self,
        *,
        every_seconds: float = EVERY_SECONDS,
        release: Callable[[], None] = return_free_heap,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._every, self._release, self._clock = every_seconds, release, clock
        self._last = clock()

    def stepped(self, seconds: float, choices: list[Choice]) -> None:  # noqa: ARG002
        if self._clock() - self._last >= self._every:
            self._return()

    def rested(self) -> None:
        self._return()

    def _return(self) -> None:
        self._release()
        self._last = self._clock()
