"""Hands units to workers, replaces those that die, and tries again what failed: for every engine.

A unit is handed out one at a time, to whoever is free: a kill costs the unit that was being done,
and a slow machine holds up no other.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from collect.errors import LaunchError
from collect.launch.board import Board
from collect.launch.task import Crew, Kind, Message

POLL_SECONDS = 0.5
PATIENCE_SECONDS = 60.0
"""Between two lines that say that nobody is ready yet."""


@dataclass
class Outcome:
    """What became of the units."""

    results: dict[str, Any] = field(default_factory=dict)
    given_up: dict[str, str] = field(default_factory=dict)
    """Unit to its last error."""
    num_retried: int = 0
    num_replaced: int = 0
    """Workers that died and were replaced."""

    def require_all(self, what: str) -> None:
        """LaunchError when units were given up: how many, the first one's error, what to do."""
        if self.given_up:
            unit, error = next(iter(self.given_up.items()))
            raise LaunchError(
                f"{len(self.given_up)} of {len(self.given_up) + len(self.results)} {what} failed, "
                f"the others are done. {unit}: {error}. Run the same command again: it does only "
                "what is missing"
            )

    def as_dict(self) -> dict[str, int]:
        """For results.json."""
        return {
            "units": len(self.results) + len(self.given_up),
            "retried": self.num_retried,
            "workers_replaced": self.num_replaced,
        }


class Dispatcher:
    """A crew at work; used as a context manager, at whose end no worker is left."""

    def __init__(
        self,
        crew: Crew,
        *,
        workers: int,
        retries: int,
        tell: Callable[[str], object] | None = None,
    ):
        self.crew = crew
        self._tell = tell or (lambda _: None)
        self._retries = retries
        self._board: Board | None = None
        self._workers = workers
        self._free: set[int] = set()
        self._gone: dict[int, str] = {}
        """Workers that are not started again, and why."""
        self._false_starts: Counter[int] = Counter()
        self.ready: set[int] = set()
        """Workers that have opened their work and live."""
        self._about: list[Any] = []
        self._amounts: dict[str, int] = {}
        self._partial: Counter[int] = Counter()
        """What each worker has reported of the unit that it does."""
        self._advance: Callable[[int], None] = lambda _: None
        self._num_replaced = 0

    def __enter__(self) -> "Dispatcher":
        return self

    def __exit__(self, *_: object) -> None:
        self.crew.close()

    def begin(self) -> Any:
        """Starts the workers; returns what the first one that is ready says of the work.

        Raises:
            LaunchError: no worker came so far.
        """
        for worker in range(self._workers):
            self.crew.start(worker)
        told = started = time.monotonic()
        while not self._about:
            self._hear()
            if time.monotonic() - told >= PATIENCE_SECONDS:
                told = time.monotonic()
                self._tell(
                    f"no worker is ready after {told - started:.0f} s: they load the model, or "
                    "wait for their turn in the queue"
                )
        return self._about[0]

    def run(
        self,
        units: Sequence[str],
        *,
        advance: Callable[[int], None] = lambda _: None,
        amounts: Collection[int] = (),
    ) -> Outcome:
        """Has every unit done; those that failed too often are told, and stop no other.

        Args:
            units: their names; each is done by one worker at a time.
            advance: told of work that is done, and with a negative number of work that is lost.
            amounts: how much each unit is; nothing given: each reports what it is.

        Raises:
            LaunchError: there is no worker left, or an error that only the user can mend.
        """
        board = self._board = Board(units, retries=self._retries)
        self._advance = advance
        self._amounts = dict(zip(units, amounts, strict=True)) if amounts else {}
        while not board.is_over:
            for worker in sorted(self._free):
                unit = board.take(worker)
                if unit is None:
                    break
                self._free.discard(worker)
                self.crew.give(worker, unit)
            self._hear()
        return Outcome(board.results, board.given_up, board.num_retried, self._num_replaced)

    def _hear(self) -> None:
        for worker, message in self.crew.events(POLL_SECONDS):
            self._handle(worker, message)
        if len(self._gone) == self._workers:
            raise LaunchError(
                f"no worker is left: {next(iter(self._gone.values()))}. What is done is kept: run "
                "the same command again"
            )

    def _handle(self, worker: int, message: Message) -> None:
        if message.is_users:
            raise LaunchError(message.error)
        if message.kind is Kind.READY:
            self._about.append(message.value)
            self.ready.add(worker)
            self._false_starts.pop(worker, None)
            self._free.add(worker)
        elif message.kind is Kind.ADVANCED:
            self._partial[worker] += message.amount
            self._move(message.amount)
        elif message.kind is Kind.DONE:
            assert self._board is not None, "who has a unit was given it"
            unit = self._board.done(worker, message.value)
            # A unit that was there already has reported nothing.
            reported = self._partial.pop(worker, 0)
            self._move(self._amounts.get(unit, reported) - reported)
            self._free.add(worker)
        elif message.kind is Kind.FAILED:
            self._lose(worker, message.error)
            self._free.add(worker)
        else:
            self._replace(worker, message.error)

    def _move(self, amount: int) -> None:
        if amount:
            self._advance(amount)

    def _lose(self, worker: int, error: str) -> None:
        self._move(-self._partial.pop(worker, 0))
        unit = None if self._board is None else self._board.failed(worker, error)
        if unit is not None:
            assert self._board is not None
            then = "given up" if unit in self._board.given_up else "to be done again"
            self._tell(f"{error}; {unit[:12]} is {then}")

    def _replace(self, worker: int, error: str) -> None:
        self._lose(worker, error)
        self._free.discard(worker)
        if worker not in self.ready:
            self._false_starts[worker] += 1
        self.ready.discard(worker)
        if self._false_starts[worker] > self._retries:
            self._gone[worker] = error
        else:
            self._num_replaced += 1
            self._tell(f"worker {worker} is replaced: {error}")
            self.crew.start(worker)
