"""How values are written: short for people, in full for programs."""

import csv
import io
import re
from collections.abc import Sequence
from html import escape

Cell = str | int | float | bool | None
NUMBER = re.compile(r"[<>~≤≥±]?\s?[-+−]?\d[\d,.]*([eE][-+]?\d+)?\s?(%|\S{1,5})?")
"""A number and perhaps its unit: `1,024`, `33 %`, `1.31x`, `250 us`."""
LONG = 60
"""Letters from which a text may be broken into lines."""


def shown(value: Cell, *, largest: float | None = None) -> str:
    """As a person reads it: a dash for what was not measured, and as many decimals as the largest
    number beside it asks for (its own size unless given), so that a column lines up.
    """
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        size = abs(value) if largest is None else largest
        if size < 0.01:
            return f"{value:.2g}"
        return f"{value:.3f}" if size < 10 else f"{value:,.1f}"
    return value


def is_number(value: Cell) -> bool:
    """Whether it lines up with figures: a number, or a text that is a number with its unit."""
    if isinstance(value, bool) or value is None:
        return False
    return not isinstance(value, str) or NUMBER.fullmatch(value.strip()) is not None


def numeric_columns(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> list[bool]:
    """For each column whether all that is known in it are numbers."""
    found = []
    for place in range(len(columns)):
        known = [row[place] for row in rows if row[place] is not None]
        found.append(bool(known) and all(map(is_number, known)))
    return found


def table_html(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """A `<table>`; figures right-aligned, all text escaped."""
    right = numeric_columns(columns, rows)
    largest = [_largest([row[place] for row in rows]) for place in range(len(columns))]
    lines = ["<table>", "<thead><tr>"]
    lines += [
        f'<th scope="col"{_class(["number"] * number)}>{escape(name)}</th>'
        for name, number in zip(columns, right, strict=True)
    ]
    lines.append("</tr></thead>\n<tbody>")
    for row in rows:
        cells = []
        for value, number, most in zip(row, right, largest, strict=True):
            text = shown(value, largest=most)
            long = isinstance(value, str) and len(value) > LONG
            names = ["number"] * number + ["none"] * (value is None) + ["long"] * long
            cells.append(f"<td{_class(names)}>{inline(text)}</td>")
        lines.append(f"<tr>{''.join(cells)}</tr>")
    lines.append("</tbody></table>")
    return "\n".join(lines)


def _largest(values: Sequence[Cell]) -> float:
    return max((abs(value) for value in values if isinstance(value, float)), default=0.0)


def _class(names: Sequence[str]) -> str:
    return f' class="{" ".join(names)}"' if names else ""


def inline(text: str) -> str:
    """Escaped text, what stands in backticks as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def csv_text(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """A header and the values in full; empty where nothing was measured."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow(["" if value is None else value for value in row])
    return file.getvalue()
