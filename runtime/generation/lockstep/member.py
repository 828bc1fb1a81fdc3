"""One generation of a group: a coroutine that stops where the group has to meet."""

import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch
from greenlet import GreenletExit, greenlet

from predictors.base import Floats, Ints
from runtime.hf.probes import Lane


class Place(IntEnum):
    """Where a member waits; within one layer the smaller comes first."""

    INPUT = 0
    """It has shown what enters a layer."""
    EXPERTS = 1
    """It needs experts of a layer: several, in any order, or the one that its own loop is at."""
    LAYER_DONE = 2
    """It has computed all that it needs of a layer."""
    PASS = 3
    """A forward pass is about to begin."""
    PASS_ENDED = 4
    """A forward pass is over; sampling comes next."""


@dataclass
class Stop:
    """What a member waits for."""

    place: Place
    layer: int = -1
    wanted: set[int] = field(default_factory=set)
    is_loop: bool = False
    """The one expert wanted is to be held, as for a loop of the module's own."""
    tokens_T: Ints | None = None
    requests_T: Ints | None = None


@dataclass
class Seen:
    """What a member's hooks have shown of one layer; copies, as the arrays are lent."""

    hidden_TD: Floats | None = None
    gate_TD: Floats | None = None
    experts_TK: Ints | None = None
    logits_TE: Floats | None = None


class Random:
    """Random numbers as after `torch.manual_seed(seed)`, whatever others draw: within the context
    they are drawn, outside of it they stand still.
    """

    def __init__(self, seed: int, device: torch.device):
        self._device = device
        self._states = [torch.Generator("cpu").manual_seed(seed).get_state()]
        if device.type == "cuda":
            self._states.append(torch.Generator(device).manual_seed(seed).get_state())

    def _swap(self) -> None:
        states = [torch.get_rng_state()]
        torch.set_rng_state(self._states[0])
        if self._device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self._device))
            torch.cuda.set_rng_state(self._states[1], self._device)
        self._states = states

    def __enter__(self) -> None:
        self._swap()

    def __exit__(self, *exc_info: object) -> None:
        self._swap()


class Coroutine(greenlet):
    """A greenlet that knows whose it is."""

    member: "Member"


class Member:
    """A generation: `run` until it returns, an error ends it, or it is cancelled."""

    def __init__(self, run: Callable[[], Any], *, random: Random | None):
        self.is_done = False
        self.result: Any = None
        """What `run` returned."""
        self.error: Exception | None = None
        """What ended it instead; None when it was cancelled, too."""
        self.lane = Lane()
        self.stop: Stop | None = None
        self.seen: dict[int, Seen] = {}
        self._run: Callable[[], Any] | None = run
        self._coroutine: Coroutine | None = Coroutine(self._body)
        self._coroutine.member = self
        self.waited = 0
        """Steps of the group for which it was at the beginning of a forward pass."""
        self._random = random

    def _body(self, _gift: object) -> None:
        assert self._run is not None
        try:
            self.result = self._run()
        except Exception as error:
            # Whoever started it asks for it; the others go on. Frames of its traceback hold what
            # the generation held, such as its cache: the lines stay, what they held goes.
            traceback.clear_frames(error.__traceback__)
            self.error = error
        except GreenletExit:
            pass  # cancelled
        finally:
            self.is_done = True
            # An error's traceback keeps this frame, which would keep the member, which keeps the
            # error.
            del self

    @property
    def is_at_pass(self) -> bool:
        return self.stop is not None and self.stop.place is Place.PASS

    @property
    def is_inside(self) -> bool:
        """Within the layers of a forward pass."""
        return self.stop is not None and self.stop.place <= Place.LAYER_DONE

    def is_at(self, layer: int, place: Place) -> bool:
        return self.stop is not None and (self.stop.layer, self.stop.place) == (layer, place)

    @property
    def wanted(self) -> set[int]:
        """Experts that it waits for."""
        return set() if self.stop is None else self.stop.wanted

    def resume(self, gift: object = None) -> None:
        """Runs it until it waits again or is done; `gift` is what it waited for."""
        assert self._coroutine is not None
        self._go_on(self._coroutine.switch, gift)

    def throw(self, error: BaseException) -> None:
        """The same, but what it waited for ends in an error."""
        assert self._coroutine is not None
        self._go_on(self._coroutine.throw, error)

    def _go_on(self, switch: Callable[[Any], Any], gift: object) -> None:
        self.stop = None
        # Within forward passes too: diffusion models draw there.
        with self._random or nullcontext():
            stop = switch(gift)
        if self.is_done:
            self._let_go()
        else:
            self.stop = stop

    def cancel(self) -> None:
        """Ends it now, wherever it waits."""
        if self.is_done:
            return
        if self._coroutine:  # it has begun
            while not self.is_done:
                self.throw(GreenletExit())
        self.is_done = True
        self._let_go()

    def _let_go(self) -> None:
        """Of all but the result: what it held is free now, not when Python next looks for cycles
        (a member and its coroutine are one).
        """
        self.stop = self._run = self._coroutine = self._random = None
        self.seen = {}


def waits() -> Member | None:
    """The member whose coroutine runs now; None outside of all."""
    current = greenlet.getcurrent()
    return current.member if isinstance(current, Coroutine) else None


def wait(member: Member, stop: Stop) -> Any:
    """Gives the turn back to the group until it resumes the member."""
    coroutine = member._coroutine
    assert coroutine is not None
    assert coroutine.parent is not None
    return coroutine.parent.switch(stop)
