"""The comparison as a person reads it in a terminal."""

from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from predictors.units import MIB

WIDE = 160
"""Characters."""
Cellwise = dict[str, Callable[[dict[str, Any]], str]]


def milliseconds(key: str) -> Callable[[dict[str, Any]], str]:
    return written(key, lambda value: f"{1000 * value:.1f}")


def percent(key: str) -> Callable[[dict[str, Any]], str]:
    return written(key, lambda value: f"{100 * value:.0f} %")


def mebibytes(key: str) -> Callable[[dict[str, Any]], str]:
    return written(key, lambda value: f"{value / MIB:,.0f}")


def times(key: str) -> Callable[[dict[str, Any]], str]:
    return written(key, lambda value: f"{value:.2f}x")


def written(key: str, how: Callable[[float], str]) -> Callable[[dict[str, Any]], str]:
    """How a column writes its figure; what was not measured is a dash."""

    def write(row: dict[str, Any]) -> str:
        value = row.get(key)
        return "-" if value is None else how(value)

    return write


SPEED: Cellwise = {
    "TPOT": milliseconds("tpot_seconds"),
    "p95": milliseconds("tpot_p95_seconds"),
    "p99": milliseconds("tpot_p99_seconds"),
    "x": times("tpot_speed_up"),
    "TTFT": milliseconds("ttft_seconds"),
    "x ": times("ttft_speed_up"),
    "tokens/s": written("tokens_per_second", lambda value: f"{value:.1f}"),
    "hits": percent("decode_hit_rate"),
    "stalled": percent("decode_stall_share"),
    "predictor": percent("decode_predictor_share"),
}
"""Times in ms; x: on-demand's time over this one's. Hits and shares are those of decode steps."""
BYTES: Cellwise = {
    "moved": mebibytes("bytes_moved"),
    "wasted": mebibytes("bytes_wasted"),
    "late": mebibytes("bytes_late"),
    "a step": mebibytes("bytes_moved_per_decode_step"),
    "read, MiB/s": mebibytes("read_bytes_per_second"),
    "link busy": percent("decode_link_share"),
    "memory": mebibytes("peak_memory_bytes"),
    "beside": mebibytes("memory_beside_bytes"),
    "page cache": mebibytes("left_in_page_cache"),
}
"""MiB; memory: the process's peak, and what of it is neither weights nor budget; page cache: what
the run left of the model's files there."""


def wide_console() -> Console:
    """The terminal; in a file, lines as long as the tables need."""
    console = Console()
    return console if console.is_terminal else Console(width=WIDE)


def show(console: Console, title: str, rows: Sequence[dict[str, Any]]) -> None:
    """Speed, then bytes and memory, then what failed."""
    good = [row for row in rows if not row.get("failed")]
    speed = f"{title}: ms, and times faster than on demand; shares of decode steps"
    console.print(table(speed, SPEED, good))
    live = [row for row in good if not row["simulated"]]
    console.print(table(f"{title}: bytes and memory, MiB (a run; a decode step)", BYTES, live))
    for row in remarks(rows):
        where = f"{row['system']}, budget {row['budget']}, batch {row['batch']}"
        line = f"{where}: {row.get('failed') or row['note']}"
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def remarks(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of what did not run, and of what ran other than its name says."""
    return [row for row in rows if row.get("failed") or row.get("note")]


def table(title: str, columns: Cellwise, rows: Sequence[dict[str, Any]]) -> Table:
    """A line for each row; budget and batch are written where they change."""
    made = Table(title=title)
    for column in ("budget", "batch", "system"):
        made.add_column(column, no_wrap=True)
    for column in columns:
        made.add_column(column, justify="right", no_wrap=True)
    cell = None
    for row in rows:
        here = row["budget"], str(row["batch"])
        made.add_row(
            *(here if here != cell else ("", "")),
            label(row),
            *(write(row) for write in columns.values()),
        )
        cell = here
    return made


def label(row: dict[str, Any]) -> str:
    """The system, and that it was not run where it was not."""
    return f"{row['system']} (simulated)" if row["simulated"] else row["system"]


def in_cells(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of a cell together, live ones first, cells in the order of their first row."""
    order: dict[tuple[str, int], int] = {}
    for row in rows:
        order.setdefault((row["budget"], row["batch"]), len(order))
    return sorted(rows, key=lambda row: (order[row["budget"], row["batch"]], row["simulated"]))
