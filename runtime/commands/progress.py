"""Terminal output of commands: lines, and progress as a bar or as a line every few seconds."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from runtime.engine.handle import ModelHandle

LINE_SECONDS = 10.0
"""Seconds between two lines."""


def print_line(console: Console, text: str) -> None:
    """Print a line without markup or wrapping."""
    console.print(text, highlight=False, soft_wrap=True, markup=False)


def print_auto_budget(handle: ModelHandle) -> None:
    """Print the budget that was computed from free memory to stderr, if one was."""
    if handle.auto_budget is not None:
        sys.stderr.write(f"{handle.auto_budget.describe()}\n")


@contextmanager
def progress(console: Console | None, what: str, *, total: int) -> Iterator[Callable[[int], None]]:
    """Yields a function that takes how much more of `total` is done; silent without a console."""
    if console is None:
        yield lambda _: None
    elif console.is_terminal:
        columns = (TextColumn(what), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("", total=total)
            yield lambda amount: bar.advance(task, amount)
    else:
        done, printed = 0, time.monotonic()

        def advance(amount: int) -> None:
            nonlocal done, printed
            done += amount
            if time.monotonic() - printed >= LINE_SECONDS:
                printed = time.monotonic()
                print_line(console, f"{what}: {100 * done / max(1, total):.0f} %")

        yield advance
