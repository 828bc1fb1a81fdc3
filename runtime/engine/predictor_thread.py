"""A thread that calls a predictor while the model computes.

ProMoE, section 4.4; fMoE, section 4.3.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from runtime.engine.predictor_drift import SampledStep

log = logging.getLogger(__name__)

MAX_WAITING = 4
"""Events that may wait. Each has a copy of the model's states, which a long prompt makes large."""
HANG_SECONDS = 30.0
"""A call that takes longer counts as hung."""
CHECK_SECONDS = 1.0
"""Interval at which a thread that is waited for is checked."""


class PredictorEvent(NamedTuple):
    """An event of the model, to be passed to a predictor."""

    name: str
    """Name of the predictor's method."""
    args: tuple[Any, ...]
    """Arguments of the method."""
    step: int
    num_tokens: int
    """Tokens of the step."""
    layer: int = -1
    """The layer that the event is of; -1: the beginning or the end of a step."""
    layer_now: int = -1
    """The first layer that a forecast can still be for."""
    sample: SampledStep | None = None
    """The step, if its forecasts are compared with its routing."""

    def with_copies(self) -> "PredictorEvent":
        """Returns the event with copies of its arrays, which the model may change later."""
        args = tuple(arg.copy() if isinstance(arg, np.ndarray) else arg for arg in self.args)
        return self._replace(args=args)


class PredictorThread:
    """Handles events in their order on a thread; the model's thread adds them.

    Args:
        handle: Called with each event. Raises nothing but faults of this program.
        on_failure: Called with a reason when `handle` raises, or hangs.
    """

    def __init__(self, handle: Callable[[PredictorEvent], None], on_failure: Callable[[str], None]):
        self._handle = handle
        self._on_failure = on_failure
        # Its methods are atomic, so that Ctrl-C leaves no lock acquired.
        self._events: queue.SimpleQueue[PredictorEvent | threading.Event | None] = (
            queue.SimpleQueue()
        )
        self._num_added = 0
        """Events of the model's thread."""
        self._num_handled = 0
        self._is_hung = False
        self._thread = threading.Thread(target=self._run, name="moecast predictor", daemon=True)
        self._thread.start()

    @property
    def is_full(self) -> bool:
        """Whether as many events wait as may."""
        return self._num_added - self._num_handled > MAX_WAITING

    def add(self, event: PredictorEvent) -> None:
        """Adds an event, after waiting for earlier ones if it is full."""
        if self.is_full:
            self.wait()
        if not self._is_hung:
            self._num_added += 1
            self._events.put(event.with_copies())

    def wait(self) -> None:
        """Waits until all events are handled; gives up on a call that hangs or a dead thread."""
        if self._is_hung or self._num_handled == self._num_added:
            return
        reached = threading.Event()
        self._events.put(reached)
        handled, since = self._num_handled, time.monotonic()
        while not reached.wait(min(CHECK_SECONDS, HANG_SECONDS)):
            if handled != self._num_handled:
                handled, since = self._num_handled, time.monotonic()
            elif not self._thread.is_alive():
                self._give_up("its thread has ended")
                return
            elif time.monotonic() - since >= HANG_SECONDS:
                self._give_up(f"a call has taken more than {HANG_SECONDS:.0f} s")
                return
        self._num_added = self._num_handled  # Ctrl-C may have come between an event and its count

    def _give_up(self, reason: str) -> None:
        self._is_hung = True
        self._on_failure(reason)

    def close(self, *, timeout_seconds: float) -> None:
        """Ends the thread after its current call. May be called twice; a hung thread is left."""
        self._events.put(None)
        if not self._is_hung:
            self._thread.join(timeout_seconds)

    def _run(self) -> None:
        while (item := self._events.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            try:
                self._handle(item)
            except BaseException as error:  # SystemExit of a predictor ends no thread
                log.exception("the predictor's thread")
                self._on_failure(f"{type(error).__name__}: {error}")
            finally:
                self._num_handled += 1
