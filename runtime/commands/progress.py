"""Terminal output of commands: lines, a model's text, and progress as a bar or as lines."""

import sys
import time
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from runtime.engine.loading import ModelHandle

LINE_SECONDS = 10.0
"""Seconds between two lines."""


def print_line(text: str, console: Console | None = None) -> None:
    """Print a line without markup or wrapping; to stdout unless a console is given."""
    (console or Console()).print(text, highlight=False, soft_wrap=True, markup=False)


def strip_control_characters(text: str) -> str:
    """Remove control characters of a text, which could be terminal escape sequences."""
    return "".join(char for char in text if char in "\n\t" or unicodedata.category(char) != "Cc")


def print_auto_budget(handle: "ModelHandle") -> None:
    """Print the budget that was computed from free memory to stderr, if one was."""
    if handle.auto_budget is not None:
        sys.stderr.write(f"{handle.auto_budget.describe()}\n")


def describe_duration(seconds: float) -> str:
    """Return a time as people say it: 50 s, 12 min, 3.5 h."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


@contextmanager
def progress(
    console: Console | None, what: str, *, total: int, unit: str | None = None
) -> Iterator[Callable[[int], None]]:
    """Yields a function that takes how much more of `total` is done; silent without a console.

    With a `unit`, such as tokens, units per second are shown too. Rate and time left are the mean's
    since the beginning.
    """
    if console is None:
        yield lambda _: None
        return
    rate = TextColumn("{task.fields[rate]}")
    columns = (TextColumn(what), BarColumn(), TaskProgressColumn(), rate, TimeRemainingColumn())
    has_bar = console.is_terminal
    started = printed = time.monotonic()
    done = 0
    with Progress(*columns, console=console, transient=True, disable=not has_bar) as bar:
        task = bar.add_task("", total=total, rate="")

        def advance(amount: int) -> None:
            nonlocal done, printed
            done += amount
            now = time.monotonic()
            seconds = max(1e-9, now - started)
            rate = f"{done / seconds:,.0f} {unit}/s" if unit is not None and done else ""
            bar.update(task, advance=amount, rate=rate)
            if not has_bar and now - printed >= LINE_SECONDS:
                printed = now
                left = f"{describe_duration(seconds / max(1, done) * max(0, total - done))} left"
                parts = (f"{100 * done / max(1, total):.0f} %", rate, left)
                print_line(f"{what}: {', '.join(filter(None, parts))}", console)

        yield advance
