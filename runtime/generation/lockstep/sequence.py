"""One generation of a lockstep group: a coroutine that yields at synchronisation points."""

import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from greenlet import GreenletExit, greenlet

from predictors.base import Floats, Ints
from runtime.accelerator import RandomStates, change_random
from runtime.hf.decode_step import change_settings, read_settings
from runtime.hf.probes import RequestTracker
from runtime.hf.row_block import DecodeStep


class SyncPoint(IntEnum):
    """A point at which a sequence waits; within one layer they come in this order."""

    INPUT = 0
    """Its input of a layer has been captured."""
    EXPERTS = 1
    """It needs experts of a layer: several in any order, or one for a module that loops itself."""
    LAYER_DONE = 2
    """It has computed all its experts of a layer."""
    FORWARD_PASS = 3
    """A forward pass is about to begin."""
    FORWARD_PASS_ENDED = 4
    """A forward pass is over; sampling comes next."""


@dataclass
class Yield:
    """A request at which a sequence is suspended."""

    point: SyncPoint
    layer: int = -1
    wanted: set[int] = field(default_factory=set)
    is_loop: bool = False
    """The module loops over experts itself and needs this one expert pinned."""
    is_grouped: bool = False
    """The module computes experts together and needs their slots."""
    tokens_T: Ints | None = None
    requests_T: Ints | None = None
    decode: DecodeStep | None = None
    """The forward pass of one token, which a block computes for it."""


@dataclass
class CapturedSignals:
    """Copies of the arrays that a sequence's hooks have captured at one layer."""

    hidden_TD: Floats | None = None
    gate_TD: Floats | None = None
    experts_TK: Ints | None = None
    logits_TE: Floats | None = None


class SequenceCoroutine(greenlet):
    """A greenlet with a reference to its sequence."""

    sequence: "SequenceTask"


class SequenceTask:
    """A generation that runs until `run` returns, raises, or is cancelled.

    Args:
        random: states that it draws from, and no other sequence; none: the thread's.
    """

    def __init__(self, run: Callable[[], Any], *, random: RandomStates):
        self.is_done = False
        self.result: Any = None
        """The return value of `run`."""
        self.error: Exception | None = None
        """The error that ended it; None if it returned or was cancelled."""
        self.lane = RequestTracker()
        self.pending: Yield | None = None
        self.captured: dict[int, CapturedSignals] = {}
        self._run: Callable[[], Any] | None = run
        self._coroutine: SequenceCoroutine | None = SequenceCoroutine(self._body)
        self._coroutine.sequence = self
        self.num_rows: int | None = None
        """Tokens of its forward pass that are not spare; None: all."""
        self.num_steps_waited = 0
        """Steps of the group that it has waited for at the beginning of a forward pass."""
        self.is_alone = True
        """Whether the group's last step had no other sequence."""
        self._random = random
        self._settings = read_settings()

    def _body(self, _value: object) -> None:
        assert self._run is not None
        try:
            self.result = self._run()
        except Exception as error:
            # Reported through `error`; other sequences continue. The traceback's frames reference
            # what the generation used, such as its KV cache: clear them and keep the line numbers.
            traceback.clear_frames(error.__traceback__)
            self.error = error
        except GreenletExit:
            pass  # cancelled
        finally:
            self.is_done = True
            # Break the cycle error -> traceback -> this frame -> sequence -> error.
            del self

    @property
    def is_inside_forward_pass(self) -> bool:
        """True within the layers of a forward pass."""
        return self.pending is not None and self.pending.point <= SyncPoint.LAYER_DONE

    def is_at(self, layer: int, point: SyncPoint) -> bool:
        pending = self.pending
        return pending is not None and (pending.layer, pending.point) == (layer, point)

    @property
    def wanted(self) -> set[int]:
        return set() if self.pending is None else self.pending.wanted

    def request_step(self, tokens_T: Ints, requests_T: Ints) -> Yield:
        """Return what it yields at the beginning of a forward pass of these tokens."""
        return Yield(SyncPoint.FORWARD_PASS, tokens_T=tokens_T, requests_T=requests_T)

    def resume(self, value: object = None) -> None:
        """Run it until it yields again or ends; `value` is what it waited for."""
        assert self._coroutine is not None
        self._switch(self._coroutine.switch, value)

    def throw(self, error: BaseException) -> None:
        """Run it as `resume` does, but raise `error` where it waits."""
        assert self._coroutine is not None
        self._switch(self._coroutine.throw, error)

    def _switch(self, switch: Callable[[Any], Any], value: object) -> None:
        self.pending = None
        # The forward pass that it is in may have changed them, and another's may differ.
        usual = change_settings(self._settings)
        try:
            # Forward passes of diffusion models draw random numbers, too.
            others = change_random(self._random)
            try:
                pending = switch(value)
            finally:
                self._random = change_random(others)
        finally:
            self._settings = change_settings(usual)
        if self.is_done:
            self._release()
        else:
            self.pending = pending

    def cancel(self) -> None:
        """End it now, at whatever point it waits."""
        if self.is_done:
            return
        if self._coroutine:  # it has begun
            while not self.is_done:
                self.throw(GreenletExit())
        self.is_done = True
        self._release()

    def _release(self) -> None:
        """Drop all but the result.

        A sequence and its coroutine form a cycle: memory is free now, not at the next collection.
        """
        self.pending = self._run = self._coroutine = None
        self.captured, self._random = {}, {}


def current_sequence() -> SequenceTask | None:
    """Return the sequence whose coroutine runs now, or None outside of all."""
    current = greenlet.getcurrent()
    return current.sequence if isinstance(current, SequenceCoroutine) else None


def yield_until_resumed(sequence: SequenceTask, pending: Yield) -> Any:
    """Suspend the sequence until the group resumes it; returns what it waited for."""
    coroutine = sequence._coroutine
    assert coroutine is not None
    assert coroutine.parent is not None
    return coroutine.parent.switch(pending)
