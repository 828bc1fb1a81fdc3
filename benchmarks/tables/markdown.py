"""Tables in Markdown, and the text of figures."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.reports import RESULTS
from predictors.units import MIB


def read_document(name: str) -> dict[str, Any] | None:
    """Reads the results of another program, `benchmarks/results/NAME.json`; None if absent."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.is_file() else None


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Returns the lines of a table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return ["| " + " | ".join(cells) + " |" for cells in lines]


def show_figure(name: str, described: str) -> list[str]:
    """Returns the line that shows `docs/images/NAME.svg` on a page of docs."""
    return [f"![{described}](images/{name}.svg)", ""]


def format_figure(value: float | str | None, digits: int = 3, unit: str = "") -> str:
    """Returns a number with its unit, a dash if it was not measured, and words unchanged."""
    if isinstance(value, str):
        return value
    return "-" if value is None else f"{value:.{digits}f}{unit}"


TPOT_COLUMNS = ("mean TPOT", "95 % interval", "median", "p95")


def format_tpot(row: Mapping[str, Any]) -> list[str]:
    """Returns the cells of `TPOT_COLUMNS`."""
    ends = row["tpot_interval_ms"]
    return [
        format_figure(row["tpot_mean_ms"], 1, " ms"),
        "-" if ends is None else f"{ends[0]:.1f} to {ends[1]:.1f}",
        format_figure(row["tpot_ms"], 1, " ms"),
        format_figure(row["tpot_p95_ms"], 1, " ms"),
    ]


def format_percent(value: float | None, digits: int = 0) -> str:
    """Returns a share as a percentage."""
    return "-" if value is None else f"{100 * value:.{digits}f} %"


def format_size(num_bytes: float) -> str:
    """Returns a size in MiB or KiB."""
    return f"{num_bytes / MIB:.1f} MiB" if num_bytes >= MIB else f"{num_bytes / 2**10:.0f} KiB"
