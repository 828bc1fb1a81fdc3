"""Terminal output of commands: lines, a model's text, and progress as a bar or as lines."""

import sys
import time
import unicodedata
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


def strip_control_characters(text: str) -> str:
    """Remove control characters of a text, which could be terminal escape sequences."""
    return "".join(char for char in text if char in "\n\t" or unicodedata.category(char) != "Cc")


def print_auto_budget(handle: ModelHandle) -> None:
    """Print the budget that was computed from free memory to stderr, if one was."""
    if handle.auto_budget is not None:
        sys.stderr.write(f"{handle.auto_budget.describe()}\n")


def describe_duration(seconds: float) -> str:
    """Return a time as people say it: 50 s, 12 min, 3.5 h."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


class WorkMeter:
    """Counts finished work and estimates the rate and the time left from the mean since it began.

    Args:
        total: all the work.
        unit: name of a unit of work, to show a rate; none is shown without.
    """

    def __init__(self, total: int, unit: str | None = None):
        self._total = total
        self._unit = unit
        self._done = 0
        self._started = time.monotonic()

    def advance(self, amount: int) -> None:
        self._done += amount

    @property
    def rate(self) -> str:
        """The rate, such as `1,200 tokens/s`; empty without a unit or before the first unit."""
        if self._unit is None or not self._done:
            return ""
        return f"{self._done / self._seconds:,.0f} {self._unit}/s"

    def describe(self) -> str:
        """Return share done, rate and time left, for a line."""
        parts = [f"{100 * self._done / max(1, self._total):.0f} %"]
        if self.rate:
            parts.append(self.rate)
        if self._done:
            left = self._seconds / self._done * max(0, self._total - self._done)
            parts.append(f"{describe_duration(left)} left")
        return ", ".join(parts)

    @property
    def _seconds(self) -> float:
        return max(1e-9, time.monotonic() - self._started)


@contextmanager
def progress(
    console: Console | None, what: str, *, total: int, unit: str | None = None
) -> Iterator[Callable[[int], None]]:
    """Yields a function that takes how much more of `total` is done; silent without a console.

    With a `unit`, such as tokens, units per second are shown too.
    """
    if console is None:
        yield lambda _: None
        return
    meter = WorkMeter(total, unit)
    if console.is_terminal:
        rate = TextColumn("{task.fields[rate]}")
        columns = (TextColumn(what), BarColumn(), TaskProgressColumn(), rate, TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("", total=total, rate="")

            def advance_bar(amount: int) -> None:
                meter.advance(amount)
                bar.update(task, advance=amount, rate=meter.rate)

            yield advance_bar
    else:
        printed = time.monotonic()

        def advance_line(amount: int) -> None:
            nonlocal printed
            meter.advance(amount)
            if time.monotonic() - printed >= LINE_SECONDS:
                printed = time.monotonic()
                print_line(console, f"{what}: {meter.describe()}")

        yield advance_line
