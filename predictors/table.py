"""One table for every place where values are shown: a terminal, Markdown, CSV and HTML reports.

    table = Table(
        columns=[
            TableColumn("system"),
            TableColumn("TPOT, ms", "tpot_ms", milliseconds, rank=1),
            TableColumn("hits", lambda row: row["hits"] / row["requests"], percent),
        ],
        rows=rows,  # mappings, dataclasses or sequences
    )
    table.print(console)
    lines = table.markdown()
    text = table.csv()

Texts are rounded, and "-" where nothing was measured; CSV has the exact values, and nothing there.
"""

import csv
import io
import json
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from predictors.units import KIB, MIB

Row = Any
"""A mapping, a sequence, or an object with attributes."""
ANY_WIDTH = 10**6
"""Characters: more than any table has."""
FILE_WIDTH = 100
"""Characters of a line in a file or pipe, which may be read in any window."""
LAST = 99
"""Rank of the columns that are left out first."""
UNSAFE = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode categories: controls, invisible formats such as changes of direction, lone surrogates,
line and paragraph separators."""


def write_value(value: Any) -> str:
    """Write a value of any type: floats with four digits, words unchanged."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:#.4g}"
    return str(value)


def format_or_dash(value: Any, write: Callable[[Any], str] = write_value) -> str:
    """Return the value as text, or a dash for None: never a zero."""
    return "-" if value is None else write(value)


@dataclass(frozen=True)
class TableColumn:
    """A column: its heading, its value in a row, how that is written, and how long it stays."""

    heading: str
    value: str | int | tuple[str | int, ...] | Callable[[Row], Any] | None = None
    """Key, attribute or index in a row, a path of them, or a function; None: the heading."""
    write: Callable[[Any], str] = write_value
    rank: int = LAST
    """Columns of high rank are left out first where a terminal is narrow, the last one first."""

    @property
    def key(self) -> str:
        """Name in CSV files and for figures."""
        return self.value if isinstance(self.value, str) else self.heading

    def get(self, row: Row) -> Any:
        """Return the row's value; None: not measured."""
        if callable(self.value):
            return self.value(row)
        path = self.heading if self.value is None else self.value
        for key in path if isinstance(path, tuple) else (path,):
            if isinstance(row, Mapping):
                row = row.get(key)
            elif row is not None:
                row = row[key] if isinstance(key, int) else getattr(row, key)
        return row

    def text(self, row: Row) -> str:
        """Return the row's value as text."""
        return format_or_dash(self.get(row), self.write)


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of values with the columns that show them."""

    columns: Sequence[TableColumn]
    """Their headings and keys are all different."""
    rows: Sequence[Row]
    title: str = ""
    left: int = 1
    """Number of columns that name a row: always shown, aligned to the left."""
    elsewhere: str = "results.json has them"
    """Place of the columns that do not fit, for the note below a table in a terminal."""

    @classmethod
    def of(
        cls,
        headings: Sequence[str],
        rows: Sequence[Sequence[Any]],
        *,
        importance: Sequence[str] = (),
        **options: Any,
    ) -> Self:
        """Make a table of rows whose values are in the order of the headings.

        Args:
            importance: headings, the most important first; the others follow in their order.
        """
        rank = {heading: place for place, heading in enumerate(importance)}
        columns = [
            TableColumn(heading, place, rank=rank.get(heading, LAST))
            for place, heading in enumerate(headings)
        ]
        return cls(columns=columns, rows=rows, **options)

    @classmethod
    def facts(cls, facts: Mapping[str, Any], title: str = "") -> Self:
        """Make a table of names and values without headings."""
        columns = [TableColumn("", 0), TableColumn("", 1)]
        return cls(columns=columns, rows=[*facts.items()], title=title, left=2)

    @classmethod
    def pivot(
        cls,
        rows: Sequence[Row],
        names: Sequence[str],
        across: str,
        value: str | Callable[[Row], Any],
        write: Callable[[Any], str] = write_value,
        **options: Any,
    ) -> Self:
        """Make a table with a row for each combination of names, a column for each `across`."""
        cell = TableColumn("", value)
        places: dict[tuple[Any, ...], dict[str, Any]] = {}
        for row in rows:
            place = places.setdefault(tuple(row[name] for name in names), {})
            place[str(row[across])] = cell.get(row)
        headings = dict.fromkeys(str(row[across]) for row in rows)
        columns = [
            *(TableColumn(name) for name in names),
            *(TableColumn(heading, None, write) for heading in headings),
        ]
        body = [
            {**dict.fromkeys(headings), **dict(zip(names, place, strict=True)), **cells}
            for place, cells in places.items()
        ]
        return cls(columns=columns, rows=body, left=len(names), **options)

    def records(self) -> list[dict[str, Any]]:
        """Return the values of each row by the columns' keys."""
        return [{column.key: column.get(row) for column in self.columns} for row in self.rows]

    def csv(self) -> str:
        """Write a header of the columns' keys and the exact values."""
        file = io.StringIO()
        writer = csv.DictWriter(file, [column.key for column in self.columns], lineterminator="\n")
        writer.writeheader()
        for record in self.records():
            writer.writerow(
                {
                    key: json.dumps(value) if isinstance(value, list | tuple) else value
                    for key, value in record.items()
                }
            )
        return file.getvalue()

    def markdown(self) -> list[str]:
        """Write the lines of a table in Markdown."""
        rows = [
            [column.text(row).replace("|", "\\|") for column in self.columns] for row in self.rows
        ]
        head = [[column.heading for column in self.columns], ["---"] * len(self.columns)]
        return ["| " + " | ".join(cells) + " |" for cells in (*head, *rows)]

    def print(self, console: Console) -> None:
        """Print the columns that fit, and which were left out.

        No figure is cut: names are folded where one figure and they are too wide.
        """
        wide = console.options.update(width=ANY_WIDTH)
        width = console.width if console.is_terminal else FILE_WIDTH
        shown = list(self.columns)
        figures = sorted(shown[self.left :], key=lambda column: column.rank)
        drawn = self._draw(shown)
        while len(figures) > 1 and console.measure(drawn, options=wide).maximum > width:
            shown.remove(figures.pop())
            drawn = self._draw(shown)
        drawn.width = min(width, console.measure(drawn, options=wide).maximum)
        if self.title:
            title = Text(escape_controls(self.title), "italic")
            console.print(title, soft_wrap=not console.is_terminal)
        # Soft: a console on a file has a width of its own, 80.
        console.print(drawn, soft_wrap=not console.is_terminal)
        if left_out := [column.heading for column in self.columns if column not in shown]:
            note = f"left out for lack of width: {', '.join(left_out)}; {self.elsewhere}"
            console.print(Text(note, "dim"), soft_wrap=not console.is_terminal)
        console.print()

    def _draw(self, columns: Sequence[TableColumn]) -> RichTable:
        """Lay out these columns; a name is written where it changes."""
        has_head = any(column.heading for column in columns)
        drawn = RichTable(
            box=SIMPLE_HEAD,
            show_header=has_head,
            show_edge=False,
            pad_edge=False,
            padding=(0, 1, 0, 0),
        )
        for place, column in enumerate(columns):
            is_name = place < self.left
            drawn.add_column(
                _plain(column.heading),
                justify="left" if is_name else "right",
                no_wrap=not is_name,
                overflow="fold",
                header_style="bold",
            )
        above: list[str] = []
        for row in self.rows:
            cells = [column.text(row) for column in columns]
            names = cells[: self.left - 1]
            drawn.add_row(
                *map(_plain, [""] * len(names) if names == above else names),
                *map(_plain, cells[len(names) :]),
            )
            above = names
        return drawn


def _plain(text: str) -> Text:
    """Return one line that cannot control the terminal."""
    return Text(escape_controls(text).replace("\n", " "))


def decimals(value: float, digits: int = 1) -> str:
    """Write `1,234.5`."""
    return f"{value:,.{digits}f}"


def percent(value: float) -> str:
    """Write a share of 1 as `33 %`."""
    return f"{100 * value:.0f} %"


def times(value: float) -> str:
    """Write a ratio as `1.31x`."""
    return f"{value:.2f}x"


def milliseconds(value: float) -> str:
    """Write milliseconds with two decimals below 100 ms and none above."""
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"


def interval(ends: Sequence[float], write: Callable[[float], str] = milliseconds) -> str:
    """Write an interval as `16.90 to 18.30`."""
    return " to ".join(map(write, ends))


def mebibytes(value: float, digits: int = 1) -> str:
    """Write bytes as a number of MiB."""
    return decimals(value / MIB, digits)


def size(num_bytes: float) -> str:
    """Write bytes with their unit."""
    if num_bytes >= MIB:
        return f"{num_bytes / MIB:,.1f} MiB"
    return f"{num_bytes / KIB:.1f} KiB" if num_bytes >= KIB else f"{num_bytes:.0f} B"


def escape_controls(text: str) -> str:
    """Replaces characters that would control the terminal by their escaped code points.

    Line ends and tabs stay.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        character.encode("unicode_escape").decode("ascii")
        if character not in "\n\t" and unicodedata.category(character) in UNSAFE
        else character
        for character in text
    )
