"""Committed results, their origin, tables in Markdown, and the text of figures."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from benchmarks.reports import read_document
from predictors.table import Table
from predictors.units import MIB
from runtime.tools.report.provenance import Provenance

Row = Mapping[str, Any]


def read_origin(name: str, part: str | None = None) -> Provenance:
    """Returns command, date, revision and machine of a committed result.

    Args:
        part: Key of a part, in a file of several parts with an origin each.
    """
    document = read_document(name)
    return Provenance(**(document if part is None else document[part])["origin"])


def origin_line(name: str, part: str | None = None) -> list[str]:
    """Returns the line that stands under a table, and an empty one."""
    command, *others = read_origin(name, part).line().split(" · ")
    return [" · ".join([f"`{command}`", *others]), ""]


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Returns the lines of a table."""
    return Table.of(columns, [*rows]).markdown()


def section(
    text: str, columns: Sequence[str], rows: Iterable[Sequence[str]], origin: Sequence[str]
) -> list[str]:
    """Returns a paragraph, the table that it introduces, and the table's origin."""
    return [text, "", *markdown_table(columns, rows), "", *origin]


def pivot(
    rows: Iterable[Any],
    line: Callable[[Any], str],
    column: Callable[[Any], str],
    cell: Callable[[Any], str],
) -> tuple[list[str], list[list[str]]]:
    """Returns the columns and lines of a table with a row's cell where its line and column meet.

    Lines and columns are in the order of their first row; a dash stands where there is no row.
    """
    named = [{"line": line(row), "column": column(row), "cell": cell(row)} for row in rows]
    table = Table.pivot(named, ["line"], "column", "cell")
    cells = [[shown.text(row) for shown in table.columns] for row in table.rows]
    return [shown.heading for shown in table.columns[1:]], cells


def show_figure(name: str, described: str) -> list[str]:
    """Returns the line that shows `docs/images/NAME.svg` on a page of docs."""
    return [f"![{described}](images/{name}.svg)", ""]


def format_figure(value: float | str | None, digits: int = 3, unit: str = "") -> str:
    """Returns a number with its unit, a dash if it was not measured, and words unchanged."""
    if isinstance(value, str):
        return value
    return "-" if value is None else f"{value:.{digits}f}{unit}"


def format_milliseconds(seconds: float | None, digits: int = 1) -> str:
    return format_figure(None if seconds is None else 1e3 * seconds, digits, " ms")


def format_percent(value: float | None, digits: int = 0) -> str:
    """Returns a share as a percentage."""
    return "-" if value is None else f"{100 * value:.{digits}f} %"


def format_size(num_bytes: float) -> str:
    """Returns a size in MiB or KiB."""
    return f"{num_bytes / MIB:.1f} MiB" if num_bytes >= MIB else f"{num_bytes / 2**10:.0f} KiB"


def format_published(value: float | str | None) -> str:
    """Returns a number with three digits, or words unchanged."""
    return value if isinstance(value, str) else "-" if value is None else f"{value:.3g}"


def format_interval(value: float | str | None, low: float | None, high: float | None) -> str:
    text = format_published(value)
    return text if low is None else f"{text} ({low:.3g} to {high:.3g})"
