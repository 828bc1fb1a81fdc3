"""Table cells: rounded in HTML, exact in CSV."""

import csv
import io
import re
from collections.abc import Sequence
from html import escape

from runtime.tools.report.series_styles import scheme_colors

Cell = str | int | float | bool | None
NUMBER = re.compile(r"[<>~≤≥±]?\s?[-+−]?\d[\d,.]*([eE][-+]?\d+)?\s?(%|\S{1,5})?")
"""A number with an optional unit: `1,024`, `33 %`, `1.31x`, `250 us`."""
LONG = 60
"""Number of characters from which a text may be wrapped."""


def format_cell(value: Cell, *, largest: float | None = None) -> str:
    """Format a cell: a dash for None, and decimals by the largest number of the column.

    Args:
        largest: largest absolute value of the column; the value itself by default.
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
    """Return whether a cell is a number, or a text that is a number with its unit."""
    if isinstance(value, bool) or value is None:
        return False
    return not isinstance(value, str) or NUMBER.fullmatch(value.strip()) is not None


def numeric_columns(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> list[bool]:
    """Return for each column whether all its known cells are numbers."""
    numeric = []
    for i in range(len(columns)):
        known = [row[i] for row in rows if row[i] is not None]
        numeric.append(bool(known) and all(map(is_number, known)))
    return numeric


def table_html(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """Make a `<table>` with numbers aligned right and all text escaped."""
    right = numeric_columns(columns, rows)
    largest = [_largest([row[i] for row in rows]) for i in range(len(columns))]
    lines = ["<table>", "<thead><tr>"]
    lines += [
        f'<th scope="col"{_class(["number"] * number)}>{escape(name)}</th>'
        for name, number in zip(columns, right, strict=True)
    ]
    lines.append("</tr></thead>\n<tbody>")
    for row in rows:
        cells = []
        for value, number, most in zip(row, right, largest, strict=True):
            text = format_cell(value, largest=most)
            long = isinstance(value, str) and len(value) > LONG
            names = ["number"] * number + ["none"] * (value is None) + ["long"] * long
            cells.append(f"<td{_class(names)}>{_swatch(value)}{inline(text)}</td>")
        lines.append(f"<tr>{''.join(cells)}</tr>")
    lines.append("</tbody></table>")
    return "\n".join(lines)


def _largest(values: Sequence[Cell]) -> float:
    return max((abs(value) for value in values if isinstance(value, float)), default=0.0)


def _swatch(value: Cell) -> str:
    """Return a dot in the colour that the name has in figures, if it has one."""
    colors = scheme_colors(value) if isinstance(value, str) else None
    if colors is None:
        return ""
    light, dark = colors
    return f'<i class="swatch" style="background: light-dark({light}, {dark})"></i>'


def _class(names: Sequence[str]) -> str:
    return f' class="{" ".join(names)}"' if names else ""


def inline(text: str) -> str:
    """Escape text and show parts in backticks as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def write_csv(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """Write a header and the exact values; empty for None."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow(["" if value is None else value for value in row])
    return file.getvalue()
