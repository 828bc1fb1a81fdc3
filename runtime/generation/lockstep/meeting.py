"""Where the members of a group wait for one another, and what the engine hears of them together.

Shape suffixes: T tokens, D hidden size, K top_k, E experts.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
from torch import Tensor

from predictors.base import Floats, Ints
from predictors.errors import MoecastError
from runtime.engine.engine import Engine
from runtime.generation.lockstep.member import Member, Place, Seen, Stop, wait, waits
from runtime.hf.probes import Probes

Array = TypeVar("Array", Floats, Ints)


class Meeting:
    """In place of the engine while a group is open: what members show and ask for stops them.

    Whoever else uses the model meanwhile is passed on to the engine.
    """

    def __init__(self, engine: Engine, probes: Probes):
        self.engine = engine
        self._probes = probes
        self._present: list[Member] = []
        """Who goes through the layers now."""
        self._is_whole = False
        """Nobody has left since the step began: arrays of all of them fit its tokens."""
        self._told: set[int] = set()
        """Layers of the step whose routing the engine has heard."""
        self._held: tuple[int, int] | None = None
        """The expert of a layer that the loop of the running member was given last."""

    # ---- members' side: a probes' listener

    def _stops(self) -> Member | None:
        """The member that speaks, where others have to be waited for."""
        member = waits()
        if member is None or (len(self._present) == 1 and self._is_whole):
            return None
        return member if member in self._present else None

    def begin_step(self, tokens_T: Ints, requests_T: Ints) -> None:
        member = waits()
        if member is None:
            self.engine.begin_step(tokens_T, requests_T)
        else:
            wait(member, Stop(Place.PASS, tokens_T=tokens_T, requests_T=requests_T))

    def layer_input(self, layer: int, hidden_TD: Floats) -> None:
        member = self._stops()
        if member is None:
            self.engine.layer_input(layer, hidden_TD)
        else:
            member.seen[layer] = Seen(hidden_TD=hidden_TD.copy())
            wait(member, Stop(Place.INPUT, layer))

    def gate_input(self, layer: int, hidden_TD: Floats) -> None:
        member = self._stops()
        if member is None:
            self.engine.gate_input(layer, hidden_TD)
        else:
            member.seen.setdefault(layer, Seen()).gate_TD = hidden_TD.copy()

    def routed(
        self, layer: int, experts_TK: Ints, logits_TE: Floats | None, weights_TK: Floats | None
    ) -> None:
        member = self._stops()
        if member is None:
            self.engine.routed(layer, experts_TK, logits_TE, weights_TK)
            return
        seen = member.seen.setdefault(layer, Seen())
        seen.experts_TK = experts_TK.copy()
        seen.logits_TE = None if logits_TE is None else logits_TE.copy()
        if self._is_whole:
            self.engine.partly_routed(layer, experts_TK)

    def end_step(self) -> None:
        member = waits()
        if member is None:
            self.engine.end_step()
        elif member in self._present:  # else its pass never began: it was cancelled before
            wait(member, Stop(Place.PASS_ENDED))

    # ---- members' side: an experts' source

    def ready(self, layer: int, wanted: list[int]) -> Iterator[tuple[int, dict[str, Tensor]]]:
        member = self._stops()
        if member is None:
            return self.engine.ready(layer, wanted)
        return _handed(member, layer, wanted)

    def hold(self, layer: int, expert: int) -> dict[str, Tensor]:
        member = self._stops()
        if member is None or self._held == (layer, expert):
            return self.engine.hold(layer, expert)
        return wait(member, Stop(Place.EXPERTS, layer, {expert}, is_loop=True))

    # ---- the group's side

    def go_on(self, member: Member) -> None:
        """What lies between two forward passes of a member."""
        with self._lane(member):
            member.resume()

    def go_through(self, members: Sequence[Member]) -> None:
        """One forward pass of all of them, from where it begins to where it is over."""
        stops = [member.stop for member in members if member.stop is not None]
        self._present, self._is_whole = list(members), True
        self._told.clear()
        try:
            self.engine.begin_step(
                np.concatenate([stop.tokens_T for stop in stops]),
                np.concatenate([stop.requests_T for stop in stops]),
            )
            for member in members:
                member.seen.clear()
                self._resume(member)
            while inside := [member for member in members if member.is_inside]:
                self._meet(inside)
        finally:
            try:
                self.engine.end_step()
            finally:
                self._present = []

    @contextmanager
    def _lane(self, member: Member) -> Iterator[None]:
        """Forward passes that begin meanwhile are the member's."""
        outside = self._probes.lane
        self._probes.lane = member.lane
        try:
            yield
        finally:
            self._probes.lane = outside

    def _resume(
        self, member: Member, gift: object = None, *, held: tuple[int, int] | None = None
    ) -> None:
        self._held = held
        with self._lane(member):
            member.resume(gift)
        self._held = None
        self._is_whole &= not member.is_done

    def _fail(self, members: Sequence[Member], error: MoecastError) -> None:
        """What they wait for does not come."""
        self._is_whole = False
        for member in members:
            with self._lane(member):
                member.throw(error)

    def _meet(self, inside: Sequence[Member]) -> None:
        """Those who are behind all others go on."""
        layer, place = min((m.stop.layer, m.stop.place) for m in inside if m.stop is not None)
        here = [m for m in inside if m.is_at(layer, place)]
        if place is Place.EXPERTS:
            self._tell_routed(layer, here)
            loops = [m for m in here if m.stop is not None and m.stop.is_loop]
            if loops:
                self._hold(layer, loops)
            else:
                self._hand_out(layer, here)
            return
        if place is Place.INPUT:
            self._tell_input(layer, here)
        for member in here:
            self._resume(member)

    # ---- what the engine hears

    def _tell_input(self, layer: int, here: Sequence[Member]) -> None:
        if self._are_all(here):
            hidden = _joined([member.seen[layer].hidden_TD for member in here])
            assert hidden is not None
            self.engine.layer_input(layer, hidden)

    def _tell_routed(self, layer: int, here: Sequence[Member]) -> None:
        if layer in self._told or not self._are_all(here):
            return
        seen = [member.seen.get(layer, Seen()) for member in here]
        gate_TD = _joined([one.gate_TD for one in seen])
        if gate_TD is not None:
            self.engine.gate_input(layer, gate_TD)
        experts_TK = _joined([one.experts_TK for one in seen])
        if experts_TK is not None:
            logits_TE = _joined([one.logits_TE for one in seen])
            self.engine.routed(layer, experts_TK, logits_TE, None)
        self._told.add(layer)

    def _are_all(self, here: Sequence[Member]) -> bool:
        """Nobody is elsewhere and nobody has left: arrays have a row for each token of the step."""
        return self._is_whole and len(here) == len(self._present)

    # ---- what the members get

    def _hand_out(self, layer: int, here: Sequence[Member]) -> None:
        """Each expert once, when it is ready, to all who want it."""
        while waiting := [member for member in here if member.is_at(layer, Place.EXPERTS)]:
            wanted = sorted({e for member in waiting for e in member.wanted})
            if not wanted:
                for member in waiting:
                    self._resume(member)
                return
            try:
                for expert, weights in self.engine.ready(layer, wanted):
                    for member in waiting:
                        if member.is_at(layer, Place.EXPERTS) and expert in member.wanted:
                            self._resume(member, (expert, weights))
            except MoecastError as error:
                failed = self.engine.failed(layer)
                left = [member for member in waiting if member.is_at(layer, Place.EXPERTS)]
                # Those who need none of what failed ask again, for the rest.
                self._fail([m for m in left if failed.intersection(m.wanted)] or left, error)

    def _hold(self, layer: int, loops: Sequence[Member]) -> None:
        """Loops of the modules' own, which count up: the one expert that is next, to all who are
        at it.
        """
        expert = min(min(member.wanted) for member in loops)
        there = [member for member in loops if member.wanted == {expert}]
        try:
            weights = self.engine.hold(layer, expert)
        except MoecastError as error:
            self._fail(there, error)
            return
        for member in there:
            self._resume(member, weights, held=(layer, expert))


def _handed(
    member: Member, layer: int, wanted: Sequence[int]
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """The wanted experts, as the group hands them out."""
    missing = set(wanted)
    given = wait(member, Stop(Place.EXPERTS, layer, missing))
    while missing:
        yield given
        missing.discard(given[0])
        # What comes after the layer waits until all have computed it: links would stand still.
        place = Place.EXPERTS if missing else Place.LAYER_DONE
        given = wait(member, Stop(place, layer, missing))


def _joined(arrays: Sequence[Array | None]) -> Array | None:
    """All rows; None where one has not shown any."""
    found = [array for array in arrays if array is not None]
    return np.concatenate(found) if len(found) == len(arrays) else None
