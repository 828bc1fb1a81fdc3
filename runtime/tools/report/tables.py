"""Values of tables as text, and tables of facts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from predictors.units import MIB

Row = Mapping[str, Any]
"""A row of results.json."""


@dataclass(frozen=True)
class FigureColumn:
    """A column of a table: its heading, its key in the rows, and how its values are written."""

    heading: str
    key: str
    write: Callable[[Any], str]

    def text(self, row: Any) -> str:
        """Return the row's value as text, a dash where it was not measured."""
        value = row.get(self.key) if isinstance(row, Mapping) else getattr(row, self.key)
        return format_or_dash(value, self.write)


def format_or_dash(value: Any, write: Callable[[Any], str]) -> str:
    """Return the value as text, or a dash for None: never a zero."""
    return "-" if value is None else write(value)


def decimals(value: float, digits: int = 1) -> str:
    """Return `1,234.5`."""
    return f"{value:,.{digits}f}"


def percent(value: float) -> str:
    """Return a share of 1 as `33 %`."""
    return f"{100 * value:.0f} %"


def speed_up(value: float) -> str:
    """Return a ratio as `1.31x`."""
    return f"{value:.2f}x"


def milliseconds(value: float) -> str:
    """Return milliseconds with two decimals below 100 ms and none above."""
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"


def interval(ends: Sequence[float]) -> str:
    """Return an interval of milliseconds as `16.90 to 18.30`."""
    low, high = map(milliseconds, ends)
    return f"{low} to {high}"


def mebibytes(value: float, digits: int = 1) -> str:
    """Return bytes in MiB."""
    return decimals(value / MIB, digits)


whole_mebibytes = partial(mebibytes, digits=0)
