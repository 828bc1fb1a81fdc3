"""How far work is, of all workers together: a bar on a terminal, a line now and then elsewhere."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LINE_SECONDS = 10.0
"""Between two lines: a log of an hour stays readable."""


class Advance(Protocol):
    """Called with the amount that is done since the last call; negative for what is lost."""

    def __call__(self, amount: int, /) -> None: ...


@contextmanager
def progress(console: Console | None, done: str, things: str, *, total: int) -> Iterator[Advance]:
    """Reports things done of `total` (`recorded` 3 of 7 `prompts`); None as console is silent."""
    if console is None:
        yield lambda _: None
    elif console.is_terminal:
        columns = (
            TextColumn(done),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn(things),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console) as bar:
            task = bar.add_task("", total=total)
            yield lambda amount: bar.advance(task, amount)
    else:
        yield _Lines(console, done, things, total)


class _Lines:
    def __init__(self, console: Console, verb: str, things: str, total: int):
        self._console = console
        self._verb, self._things = verb, things
        self._total = total
        self._done = 0
        self._started = self._told = time.monotonic()

    def __call__(self, amount: int) -> None:
        self._done += amount
        now = time.monotonic()
        if now - self._told >= LINE_SECONDS or self._done == self._total:
            self._told = now
            seconds = now - self._started
            self._console.print(
                f"{self._verb} {self._done} of {self._total} {self._things} in {seconds:.0f} s",
                highlight=False,
            )
