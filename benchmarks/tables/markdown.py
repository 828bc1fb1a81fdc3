"""Tables in Markdown with the origin of their results, and the text of figures."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from benchmarks.reports import Document
from predictors.table import Table
from predictors.units import MIB
from runtime.tools.report.provenance import Provenance

Row = Mapping[str, Any]


def origin_lines(*reports: Document) -> list[str]:
    """Returns the lines that stand under the table of results or of their parts, each once."""
    lines = []
    for origin in dict.fromkeys(Provenance(**report.origin).line() for report in reports):
        command, *others = origin.split(" · ")
        lines += [" · ".join([f"`{command}`", *others]), ""]
    return lines


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Returns the lines of a table."""
    return Table.of(columns, [*rows]).markdown()


def section(
    text: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *reports: Document
) -> list[str]:
    """Returns a paragraph, the table that it introduces, and the origin of its results."""
    return [text, "", *markdown_table(columns, rows), "", *origin_lines(*reports)]


def share(budget: str) -> float:
    """Returns the number of a budget in percent."""
    return float(budget.rstrip("%"))


def pivot(
    rows: Iterable[Any],
    line: Callable[[Any], str],
    column: Callable[[Any], str],
    cell: Callable[[Any], str],
    rank: Callable[[str], float] | None = None,
) -> tuple[list[str], list[list[str]]]:
    """Returns the columns and lines of a table with a row's cell where its line and column meet.

    Lines and columns are in the order of their first row, columns by their rank if it is given; a
    dash stands where there is no row.
    """
    cells = {(line(row), column(row)): cell(row) for row in rows}
    columns = list(dict.fromkeys(at for _, at in cells))
    if rank is not None:
        columns.sort(key=rank)
    names = dict.fromkeys(name for name, _ in cells)
    return columns, [[name, *(cells.get((name, at), "-") for at in columns)] for name in names]


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
