"""Starts generations, steps them together, ends them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from runtime.errors import GroupError
from runtime.generation.lockstep.meeting import Meeting
from runtime.generation.lockstep.member import Member, Random


class Group:
    """Generations of one served model that go through its layers together; a context manager.

    Not thread-safe: one thread calls all of it. Other threads may use the model by themselves
    meanwhile; their forward passes take turns with the group's.

    Raises:
        GroupError: the model is not a served one, or has a group already.
    """

    def __init__(self, model: PreTrainedModel):
        handle = getattr(model, "moecast", None)
        if handle is None:
            raise GroupError("a group needs a model from runtime.load")
        if isinstance(handle.front.server, Meeting):
            raise GroupError("this model has a group already; close that one first")
        self._device = model.device
        self._front = handle.front
        self._meeting = Meeting(handle.engine, handle.probes)
        self._front.server = self._meeting
        self._members: list[Member] = []
        self._is_closed = False

    @property
    def members(self) -> Sequence[Member]:
        """Those that have not ended, in the order in which they were started."""
        return tuple(self._members)

    def start(self, run: Callable[[], Any], *, seed: int | None = None) -> Member:
        """A generation that the next step begins.

        Args:
            run: calls the model as often as it likes; runs as a coroutine, gradients off.
            seed: its random numbers are those that follow `torch.manual_seed(seed)`, whatever the
                others draw; None: the thread's own.
        """
        if self._is_closed:
            raise GroupError("this group was closed; open another one")
        member = Member(run, random=None if seed is None else Random(seed, self._device))
        self._members.append(member)
        return member

    def step(self) -> list[Member]:
        """Every member makes one forward pass, together with the others, and goes on to where its
        next one begins; returns those that have ended.

        Members at different parts of a model (an encoder, its decoder) take turns.
        """
        with torch.no_grad():
            try:
                for member in self._members:
                    if member.stop is None and not member.is_done:
                        self._meeting.go_on(member)
                if members := self._next():
                    self._meeting.go_through(members)
                    for member in members:
                        if not member.is_done:
                            self._meeting.go_on(member)
            except BaseException:
                self.close()  # where the others are is not known: none of them could go on
                raise
        return self._take_ended()

    def _next(self) -> list[Member]:
        waiting = [member for member in self._members if member.is_at_pass]
        if not waiting:
            return []
        part = max(waiting, key=lambda member: member.waited).lane.part
        for member in waiting:
            member.waited = 0 if member.lane.part == part else member.waited + 1
        return [member for member in waiting if member.lane.part == part]

    def _take_ended(self) -> list[Member]:
        ended = [member for member in self._members if member.is_done]
        self._members = [member for member in self._members if not member.is_done]
        return ended

    def cancel(self, member: Member) -> None:
        """Ends a member now; between two steps."""
        with torch.no_grad():
            member.cancel()
        self._take_ended()

    def close(self) -> None:
        """Cancels all; the model is as it was before. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        for member in self._members:
            self.cancel(member)
        self._front.server = self._meeting.engine

    def __enter__(self) -> "Group":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
