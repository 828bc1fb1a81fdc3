"""One thread that owns the model: a bounded queue goes in, answers come out together."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any, Protocol

from transformers import PreTrainedModel

from predictors.errors import MoecastError
from runtime.errors import TransferError
from runtime.serving.choice import Choice
from runtime.serving.errors import (
    Draining,
    EngineDead,
    ExpertsUnreadable,
    GenerationFailed,
    NotReady,
    QueueFull,
    RequestError,
)
from runtime.serving.facts import Facts
from runtime.serving.observer import Observer

log = logging.getLogger(__name__)

REST_SECONDS = 0.5
"""Without work for so long the engine rests; requests that follow each other leave less between."""


class State(StrEnum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    """What was accepted is completed, nothing new is."""
    ENDED = "ended"
    FAILED = "failed"
    """The model could not be loaded, or the engine itself failed."""


class Group(Protocol):
    """Generations that go through the layers together: a `lockstep.LockstepGroup`."""

    def start(self, run: Callable[[], Any], *, seed: int | None = None) -> Any: ...

    def step(self) -> Sequence[Any]: ...

    def cancel(self, member: Any) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Served:
    """What the engine thread works with, once it is loaded."""

    model: PreTrainedModel
    group: Group
    facts: Facts


class Service:
    """Every method may be called from any thread.

    Args:
        open_model: loads; called in the engine thread.
        max_running: choices that are generated together.
        max_waiting: choices beyond these that may wait.
        rest_seconds: without work for so long, observers are told that the engine rests.
    """

    def __init__(
        self,
        open_model: Callable[[], Served],
        *,
        max_running: int,
        max_waiting: int,
        observers: Sequence[Observer] = (),
        rest_seconds: float = REST_SECONDS,
    ):
        self.max_running = max_running
        self.max_waiting = max_waiting
        self._open_model = open_model
        self._rest_seconds = rest_seconds
        self._observers = tuple(observers)
        self._hears: list[Callable[[State], None]] = []
        self._condition = threading.Condition()
        self._waiting: deque[Choice] = deque()
        self._running: dict[Choice, Any] = {}
        """Choices and their members."""
        self._state = State.LOADING
        self.error: BaseException | None = None
        """Why the service failed."""
        self.served: Served | None = None
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)

    def start(self) -> None:
        """Begins to load."""
        self._thread.start()

    # ---- what it is asked

    @property
    def state(self) -> State:
        return self._state

    @property
    def is_alive(self) -> bool:
        """Whether the engine thread lives and works."""
        return self._thread.is_alive() and self._state is not State.FAILED

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def on_change(self, hear: Callable[[State], None]) -> None:
        """From now on, `hear` is called with every new state, in the thread in which it changed."""
        self._hears.append(hear)

    def add_observer(self, observer: Observer) -> None:
        """From now on, this one is told, too."""
        self._observers = (*self._observers, observer)

    # ---- what it is told

    def require_room(self, num_choices: int = 1) -> None:
        """Raises what `submit` would raise now, at no cost."""
        with self._condition:
            refusal = self._refusal(num_choices)
        if refusal is not None:
            self._tell_refused(refusal)
            raise refusal

    def submit(self, choices: Sequence[Choice]) -> None:
        """Takes all of a request's choices, or none.

        Raises:
            QueueFull: so many can not wait now.
            NotReady, Draining, EngineDead: none can.
        """
        with self._condition:
            refusal = self._refusal(len(choices))
            if refusal is None:
                self._waiting.extend(choices)
                # Told before the engine thread can take them.
                for choice in choices:
                    self._tell("queued", choice)
                self._condition.notify_all()
        if refusal is not None:
            self._tell_refused(refusal)
            raise refusal

    def _refusal(self, num_choices: int) -> RequestError | None:
        if self._state is State.LOADING:
            return NotReady("the model is loading; ask again when /ready answers 200")
        if self._state in (State.DRAINING, State.ENDED):
            return Draining("the server is shutting down; ask another one, or this one again later")
        if self._state is State.FAILED:
            return EngineDead(f"the engine has failed: {self.error}; restart the server")
        taken = len(self._running) + len(self._waiting) + num_choices
        if taken > self.max_running + self.max_waiting:
            return QueueFull(
                f"{len(self._running)} answers are being generated and {len(self._waiting)} wait: "
                f"no room for {num_choices} more; ask again later, or raise max_waiting"
            )
        return None

    def cancel(self, choices: Sequence[Choice]) -> None:
        """Ends them before the next forward pass; those that have ended stay as they are."""
        with self._condition:
            for choice in choices:
                choice.is_cancelled = True
            # Who waits gives the place back at once, however long a step takes.
            gone = [choice for choice in self._waiting if choice.is_cancelled]
            if gone:
                self._waiting = deque(one for one in self._waiting if not one.is_cancelled)
            self._condition.notify_all()
        for choice in gone:
            choice.abort()
            self._tell("ended", choice)

    def drain(self) -> None:
        """Takes nothing new from now on."""
        with self._condition:
            if self._state in (State.LOADING, State.READY):
                self._change(State.DRAINING)

    def wait_idle(self, timeout_seconds: float | None = None) -> bool:
        """Whether nothing runs or waits, at the latest when the time is over."""
        with self._condition:
            return self._condition.wait_for(
                lambda: (
                    not (self._running or self._waiting)
                    or not self.is_alive
                    or self._state is State.ENDED
                ),
                timeout_seconds,
            )

    def close(self, *, timeout_seconds: float | None = None) -> bool:
        """Cancels everything, ends the thread; whether it ended in time.

        A forward pass can not be interrupted: when it takes longer, those who wait for its tokens
        are told all the same.
        """
        with self._condition:
            if self._state is not State.FAILED:
                self._change(State.ENDED)
            self._condition.notify_all()
        if self._thread.ident is not None:
            self._thread.join(timeout_seconds)
        if is_left := self._thread.is_alive():
            self._end_all()
        return not is_left

    # ---- the engine thread

    def _work(self) -> None:
        try:
            self.served = self._open_model()
            with self._condition:
                if self._state is State.LOADING:
                    self._change(State.READY)
            try:
                while self._wait_for_work():
                    self._step()
            finally:
                self._close_model()
        except Exception as error:
            # The one place above everything that the thread does: without it clients would wait
            # for ever for a thread that is gone.
            self.error = error
            level = logging.WARNING if isinstance(error, MoecastError) else logging.ERROR
            log.log(level, "the engine ended: %s", error, exc_info=level == logging.ERROR)
            with self._condition:
                self._change(State.FAILED)
        finally:
            self._end_all()

    def _wait_for_work(self) -> bool:
        """Waits until there is something to do; False when the service has ended."""
        with self._condition:
            self._condition.notify_all()  # somebody may wait for idleness
            is_awake = self._condition.wait_for(self._has_to_act, self._rest_seconds)
        if not is_awake:
            self._tell("rested")
            with self._condition:
                self._condition.wait_for(self._has_to_act)
        return self._state is not State.ENDED

    def _has_to_act(self) -> bool:
        return self._state is State.ENDED or bool(self._running or self._waiting)

    def _step(self) -> None:
        """Cancels, starts, makes one forward pass, tells."""
        assert self.served is not None
        group = self.served.group
        with self._condition:
            cancelled = [choice for choice in self._running if choice.is_cancelled]
        for choice in cancelled:
            group.cancel(self._running[choice])
            choice.abort()
            self._leave(choice)
        self._admit()
        if not self._running:
            return
        start = time.monotonic()
        group.step()
        seconds = time.monotonic() - start
        present = list(self._running)
        for choice in present:
            choice.flush()
        self._tell("stepped", seconds, present)
        for choice in present:
            if self._running[choice].is_done:
                self._conclude(choice)

    def _admit(self) -> None:
        assert self.served is not None
        model, tokenizer = self.served.model, self.served.facts.tokenizer
        while True:
            with self._condition:
                if not self._waiting or not self._has_room(self._waiting[0]):
                    return
                choice = self._waiting.popleft()
                self._running[choice] = self.served.group.start(
                    partial(choice.run, model, tokenizer), seed=choice.sampling.seed
                )
            choice.started_at = time.monotonic()
            self._tell("started", choice)

    def _has_room(self, choice: Choice) -> bool:
        """Whether it may run beside those that do; alone every one may (`Facts.longest`)."""
        assert self.served is not None
        if not self._running:
            return True
        if len(self._running) >= self.max_running:
            return False
        caches = self.served.facts.caches
        together = (*self._running, choice)
        return caches is None or caches.fit(one.most_cached for one in together)

    def _conclude(self, choice: Choice) -> None:
        """Its member is done."""
        error = self._running[choice].error
        if error is None:
            choice.complete()
        else:
            choice.fail(refusal_of(error, choice))
        self._leave(choice)

    def _leave(self, choice: Choice) -> None:
        with self._condition:
            del self._running[choice]
        self._tell("ended", choice)

    def _end_all(self) -> None:
        """Nobody generates any more: everyone is told."""
        with self._condition:
            left = [*self._running, *self._waiting]
            self._running.clear()
            self._waiting.clear()
            refusal = self._refusal(1)
            self._condition.notify_all()
        for choice in left:
            choice.fail(refusal or Draining("the server is shutting down"))
            self._tell("ended", choice)

    def _close_model(self) -> None:
        assert self.served is not None
        self.served.group.close()
        self.served.model.close()

    # ---- who is told

    def _change(self, state: State) -> None:
        self._state = state
        for hear in self._hears:
            hear(state)

    def _tell(self, event: str, *what: Any) -> None:
        for observer in self._observers:
            getattr(observer, event)(*what)

    def _tell_refused(self, error: RequestError) -> None:
        self._tell("refused", error)


def refusal_of(error: Exception, choice: Choice) -> RequestError:
    """What a client is told of an exception that ended its generation."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, TransferError):
        log.error("%s: %s", choice.request_id, error)
        return ExpertsUnreadable(f"experts of the model could not be read: {error}")
    log.error("%s: the generation failed", choice.request_id, exc_info=error)
    return GenerationFailed(
        f"the generation failed ({type(error).__name__}); the server's log says more under "
        f"request id {choice.request_id}"
    )
