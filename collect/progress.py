"""How far a recording is: a bar on a terminal, a line now and then elsewhere."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LINE_SECONDS = 10.0
"""Between two lines: a log of an hour stays readable."""


class Advance(Protocol):
    """Called with the number of prompts that are done since the last call."""

    def __call__(self, num_prompts: int, /) -> None: ...


@contextmanager
def prompts_progress(console: Console | None, *, total: int) -> Iterator[Advance]:
    """Reports prompts done of `total`; None as console reports nothing."""
    if console is None:
        yield lambda _: None
    elif console.is_terminal:
        columns = (
            TextColumn("recording"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("prompts"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console) as bar:
            task = bar.add_task("", total=total)
            yield lambda num_prompts: bar.advance(task, num_prompts)
    else:
        yield _Lines(console, total)


class _Lines:
    def __init__(self, console: Console, total: int):
        self._console = console
        self._total = total
        self._done = 0
        self._started = self._told = time.monotonic()

    def __call__(self, num_prompts: int) -> None:
        self._done += num_prompts
        now = time.monotonic()
        if now - self._told >= LINE_SECONDS or self._done == self._total:
            self._told = now
            seconds = now - self._started
            self._console.print(
                f"recorded {self._done} of {self._total} prompts in {seconds:.0f} s",
                highlight=False,
            )
