"""The engine thread, which owns the model, and the bounded queue of choices in front of it."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import partial
from typing import Any

from predictors.errors import MoecastError
from runtime.errors import GrammarError, StepMemoryError, TransferError
from runtime.generation.lockstep.sequence import SequenceTask
from runtime.serving.choice import CompletionChoice, FinishReason
from runtime.serving.errors import (
    ContextTooLong,
    Draining,
    EngineDead,
    ExpertsUnreadable,
    GenerationFailed,
    NotReady,
    QueueFull,
    RequestError,
    ServerBusy,
)
from runtime.serving.served_model import LoadedModel

log = logging.getLogger(__name__)

IDLE_AFTER_SECONDS = 0.5
"""Time without work after which the engine is idle; consecutive requests leave shorter gaps."""


class ServiceState(StrEnum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    """Accepted choices are completed, new ones are rejected."""
    ENDED = "ended"
    FAILED = "failed"
    """The model could not be loaded, or the engine thread failed."""


class ServiceObserver:
    """Base class for metrics and the like; each method does nothing.

    A choice carries its counts and times. The thread in which the event happens makes the call:
    the client's for `on_rejected` and `on_queued`, the cancelling one for `on_ended` of a choice
    that never started, the engine thread for all others. No method may block or raise.
    """

    def on_rejected(self, error: RequestError) -> None:
        """A request was rejected: the queue is full, or the server is loading or shutting down."""

    def on_queued(self, choice: CompletionChoice) -> None:
        """A choice entered the queue."""

    def on_started(self, choice: CompletionChoice) -> None:
        """A choice left the queue and is generated from the next step on."""

    def on_step(self, seconds: float, choices: list[CompletionChoice]) -> None:
        """One forward pass of these choices ended; their events have been delivered."""

    def on_ended(self, choice: CompletionChoice) -> None:
        """A choice ended, for its `finish_reason`; it may never have started."""

    def on_idle(self) -> None:
        """Nothing has run or waited for `idle_after_seconds`; called once per idle period."""


class GenerationService:
    """Queues choices and generates up to `max_running` of them together. Thread-safe.

    Args:
        open_model: loads the model; called in the engine thread.
        idle_after_seconds: time without work before observers' `on_idle`.
    """

    def __init__(
        self,
        open_model: Callable[[], LoadedModel],
        *,
        max_running: int,
        max_waiting: int,
        observers: Sequence[ServiceObserver] = (),
        idle_after_seconds: float = IDLE_AFTER_SECONDS,
    ):
        self.max_running = max_running
        self.max_waiting = max_waiting
        self._open_model = open_model
        self._idle_after_seconds = idle_after_seconds
        self._observers = tuple(observers)
        self._state_listeners: list[Callable[[ServiceState], None]] = []
        self._condition = threading.Condition()
        self._waiting: deque[CompletionChoice] = deque()
        self._running: dict[CompletionChoice, SequenceTask] = {}
        self.state = ServiceState.LOADING
        self.error: BaseException | None = None
        """The exception that ended the engine thread."""
        self.loaded: LoadedModel | None = None
        self._thread = threading.Thread(target=self._run_engine, name="engine", daemon=True)

    def start(self) -> None:
        """Start the engine thread, which loads the model."""
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the engine thread runs and has not failed."""
        return self._thread.is_alive() and self.state is not ServiceState.FAILED

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def on_state_change(self, listener: Callable[[ServiceState], None]) -> None:
        """Call `listener` with every new state, in the thread that changes it."""
        self._state_listeners.append(listener)

    def add_observer(self, observer: ServiceObserver) -> None:
        self._observers = (*self._observers, observer)

    # ---- called by requests

    def require_capacity(self) -> None:
        """Raise what `submit` would raise now, before any work is done for the request."""
        with self._condition:
            self._require_room(1)

    def submit(self, choices: Sequence[CompletionChoice]) -> None:
        """Queue all of a request's choices, or none.

        Raises:
            QueueFull: the queue has fewer free places.
            NotReady, Draining, EngineDead: the service accepts no choices in its state.
        """
        with self._condition:
            self._require_room(len(choices))
            self._waiting.extend(choices)
            # Within the lock: before the engine thread can start them.
            for choice in choices:
                self._notify("on_queued", choice)
            self._condition.notify_all()

    def _require_room(self, num_choices: int) -> None:
        rejection = self._rejection(num_choices)
        if rejection is not None:
            self._notify("on_rejected", rejection)
            raise rejection

    def _rejection(self, num_choices: int) -> RequestError | None:
        if self.state is ServiceState.LOADING:
            return NotReady("the model is loading; try again when /ready answers 200")
        if self.state in (ServiceState.DRAINING, ServiceState.ENDED):
            return Draining("the server is shutting down; try another server, or this one later")
        if self.state is ServiceState.FAILED:
            return EngineDead(f"the engine has failed: {self.error}; restart the server")
        num_accepted = len(self._running) + len(self._waiting)
        if num_accepted + num_choices > self.max_running + self.max_waiting:
            return QueueFull(
                f"the queue is full: {len(self._running)} answers are running, "
                f"{len(self._waiting)} are waiting, no room for {num_choices} more; try again "
                "later, or raise max_waiting"
            )
        return None

    def cancel(self, choices: Sequence[CompletionChoice]) -> None:
        """End choices before the next forward pass; those that have ended stay as they are."""
        with self._condition:
            for choice in choices:
                choice.is_cancelled = True
            # Waiting ones free their places at once, however long the current step takes.
            removed = [choice for choice in self._waiting if choice.is_cancelled]
            if removed:
                self._waiting = deque(c for c in self._waiting if not c.is_cancelled)
            self._condition.notify_all()
        for choice in removed:
            choice.abort()
            self._notify("on_ended", choice)

    def drain(self) -> None:
        """Reject new choices from now on."""
        with self._condition:
            if self.state in (ServiceState.LOADING, ServiceState.READY):
                self._set_state(ServiceState.DRAINING)

    def wait_idle(self, timeout_seconds: float | None = None) -> bool:
        """Wait until nothing runs or waits; False if the timeout comes first."""
        with self._condition:
            return self._condition.wait_for(
                lambda: (
                    not (self._running or self._waiting)
                    or not self.is_alive
                    or self.state is ServiceState.ENDED
                ),
                timeout_seconds,
            )

    def close(self, *, timeout_seconds: float | None = None) -> bool:
        """Cancel everything and end the engine thread; False if it did not end in time.

        A forward pass cannot be interrupted: if it takes longer than the timeout, the choices are
        ended without it.
        """
        with self._condition:
            if self.state is not ServiceState.FAILED:
                self._set_state(ServiceState.ENDED)
            self._condition.notify_all()
        if self._thread.ident is not None:
            self._thread.join(timeout_seconds)
        if not self._thread.is_alive():
            return True
        self._fail_all()
        return False

    # ---- the engine thread

    def _run_engine(self) -> None:
        try:
            self.loaded = self._open_model()
            with self._condition:
                if self.state is ServiceState.LOADING:
                    self._set_state(ServiceState.READY)
            try:
                while self._receive():
                    if self._admit():
                        seconds = self._step()
                        self._deliver(seconds)
                        self._free()
            finally:
                self.loaded.group.close()
                self.loaded.model.close()
        except Exception as error:
            # The outermost frame of the thread: without this clients would wait forever.
            self.error = error
            level = logging.WARNING if isinstance(error, MoecastError) else logging.ERROR
            log.log(level, "the engine failed: %s", error, exc_info=level == logging.ERROR)
            with self._condition:
                self._set_state(ServiceState.FAILED)
        finally:
            self._fail_all()

    def _receive(self) -> bool:
        """Wait for work, and end what was cancelled; False when the service has ended."""
        with self._condition:
            self._condition.notify_all()  # wakes `wait_idle`
            has_work = self._condition.wait_for(self._has_to_act, self._idle_after_seconds)
        if not has_work:
            self._notify("on_idle")
            with self._condition:
                self._condition.wait_for(self._has_to_act)
        if self.state is ServiceState.ENDED:
            return False
        for choice in [choice for choice in self._running if choice.is_cancelled]:
            self._served.group.cancel(self._running[choice])
            choice.abort()
            self._remove(choice)
        return True

    def _has_to_act(self) -> bool:
        return self.state is ServiceState.ENDED or bool(self._running or self._waiting)

    def _admit(self) -> bool:
        """Start waiting choices in their order while there is room; whether any choice runs."""
        loaded = self._served
        while True:
            with self._condition:
                if not self._waiting or not self._can_start(self._waiting[0]):
                    return bool(self._running)
                choice = self._waiting.popleft()
                tokenizer, drafting = loaded.info.tokenizer, loaded.drafting
                generate = partial(choice.run, loaded.model, tokenizer, drafting=drafting)
                self._running[choice] = loaded.group.start(generate, seed=choice.sampling.seed)
            choice.started_at = time.monotonic()
            self._reuse_prefix(choice)
            self._notify("on_started", choice)

    def _step(self) -> float:
        """Run one forward pass of all running choices; returns its seconds."""
        start = time.monotonic()
        self._served.group.step()
        return time.monotonic() - start

    def _deliver(self, seconds: float) -> None:
        """Give their new tokens to the requests."""
        choices = list(self._running)
        for choice in choices:
            choice.flush()
        self._notify("on_step", seconds, choices)

    def _free(self) -> None:
        """End the choices whose generation has ended, which gives their places to others."""
        for choice, task in list(self._running.items()):
            if task.is_done:
                if task.error is None:
                    choice.complete()
                else:
                    is_alone = len(self._running) == 1
                    choice.fail(to_request_error(task.error, choice, is_alone=is_alone))
                self._remove(choice)

    @property
    def _served(self) -> LoadedModel:
        assert self.loaded is not None
        return self.loaded

    def _can_start(self, choice: CompletionChoice) -> bool:
        """Whether it fits with the running ones; alone each one does (`ModelInfo.max_length`)."""
        if not self._running:
            return True
        if len(self._running) >= self.max_running:
            return False
        kv_budget = self._served.info.kv_budget
        return kv_budget is None or kv_budget.fits(
            running.max_cached_tokens for running in (*self._running, choice)
        )

    def _reuse_prefix(self, choice: CompletionChoice) -> None:
        """Find what is kept of a choice's prompt; other kept texts yield to its KV cache."""
        if (kept := self._served.kept) is not None:
            running = [one.max_cached_tokens for one in self._running]
            if choice.can_reuse_prefix:
                choice.begin_text(kept.begin(choice.prompt, running=running))
            else:
                kept.make_room_for(running)

    def _remove(self, choice: CompletionChoice) -> None:
        if (kept := self._served.kept) is not None:
            kept.make_room_for(one.max_cached_tokens for one in self._running if one is not choice)
            if (text := choice.take_text()) is not None:
                is_intact = choice.finish_reason is not FinishReason.ERROR
                kept.end(text, is_intact=is_intact)
        with self._condition:
            del self._running[choice]
        self._notify("on_ended", choice)

    def _fail_all(self) -> None:
        """End every choice in an error: the engine thread does not run any more."""
        with self._condition:
            choices = [*self._running, *self._waiting]
            self._running.clear()
            self._waiting.clear()
            rejection = self._rejection(1)
            self._condition.notify_all()
        for choice in choices:
            choice.fail(rejection or Draining("the server is shutting down"))
            self._notify("on_ended", choice)

    def _set_state(self, state: ServiceState) -> None:
        self.state = state
        for listener in self._state_listeners:
            listener(state)

    def _notify(self, event: str, *arguments: Any) -> None:
        for observer in self._observers:
            getattr(observer, event)(*arguments)


def to_request_error(error: Exception, choice: CompletionChoice, *, is_alone: bool) -> RequestError:
    """Return the client's error for an exception that ended its generation.

    Args:
        is_alone: no other choice took memory meanwhile.
    """
    if isinstance(error, RequestError):
        return error
    if isinstance(error, GrammarError):
        return RequestError(str(error))
    if isinstance(error, StepMemoryError):
        log.error("%s: %s", choice.request_id, error)
        return ContextTooLong(str(error)) if is_alone else ServerBusy(str(error))
    if isinstance(error, TransferError):
        log.error("%s: %s", choice.request_id, error)
        return ExpertsUnreadable(f"cannot read experts of the model: {error}")
    log.error("%s: the generation failed", choice.request_id, exc_info=error)
    return GenerationFailed(
        f"the generation failed ({type(error).__name__}); the server's log has the details of "
        f"request {choice.request_id}"
    )
