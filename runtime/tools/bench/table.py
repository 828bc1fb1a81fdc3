"""Print the comparison as tables in the terminal."""

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table

from predictors.units import MIB
from runtime.tools.bench.rows import BenchRow

WIDE = 160
"""Characters of a line in a file."""
Columns = dict[str, Callable[[BenchRow], str]]


def milliseconds(key: str) -> Callable[[BenchRow], str]:
    """Format a column in milliseconds."""
    return format_column(key, lambda value: f"{1000 * value:.1f}")


def percent(key: str) -> Callable[[BenchRow], str]:
    """Format a column in percent."""
    return format_column(key, lambda value: f"{100 * value:.0f} %")


def mebibytes(key: str) -> Callable[[BenchRow], str]:
    """Format a column in MiB."""
    return format_column(key, lambda value: f"{value / MIB:,.0f}")


def times(key: str) -> Callable[[BenchRow], str]:
    """Format a column in multiples."""
    return format_column(key, lambda value: f"{value:.2f}x")


def format_column(key: str, how: Callable[[float], str]) -> Callable[[BenchRow], str]:
    """Make the function that formats a column's figure; a dash if it was not measured."""

    def write(row: BenchRow) -> str:
        value = getattr(row, key)
        return "-" if value is None else how(value)

    return write


SPEED: Columns = {
    "TPOT": milliseconds("tpot_seconds"),
    "p95": milliseconds("tpot_p95_seconds"),
    "p99": milliseconds("tpot_p99_seconds"),
    "x": times("tpot_speed_up"),
    "TTFT": milliseconds("ttft_seconds"),
    "x ": times("ttft_speed_up"),
    "tokens/s": format_column("tokens_per_second", lambda value: f"{value:.1f}"),
    "hits": percent("decode_hit_rate"),
    "stalled": percent("decode_stall_share"),
    "predictor": percent("decode_predictor_share"),
}
"""Times in ms; x: on-demand's time divided by this one's; hits and shares are of decode steps."""
BYTES: Columns = {
    "moved": mebibytes("bytes_moved"),
    "wasted": mebibytes("bytes_wasted"),
    "late": mebibytes("bytes_late"),
    "per step": mebibytes("bytes_moved_per_decode_step"),
    "read, MiB/s": mebibytes("read_bytes_per_second"),
    "link busy": percent("decode_link_share"),
    "memory": mebibytes("peak_memory_bytes"),
    "overhead": mebibytes("memory_beside_bytes"),
    "page cache": mebibytes("left_in_page_cache"),
}
"""MiB; memory: the process's peak; overhead: peak memory less weights and arena; page cache: bytes
of the model's files that the run left there."""


def wide_console() -> Console:
    """Make a console whose lines in a file are as long as the tables need."""
    console = Console()
    return console if console.is_terminal else Console(width=WIDE)


def print_tables(console: Console, title: str, rows: Sequence[BenchRow]) -> None:
    """Print speed, then bytes and memory, then notes and failures."""
    good = [row for row in rows if not row.failed]
    speed = f"{title}: ms, speed-up over on-demand, shares of decode steps"
    console.print(make_table(speed, SPEED, good))
    live = [row for row in good if not row.simulated]
    console.print(
        make_table(f"{title}: bytes and memory, MiB per run and per decode step", BYTES, live)
    )
    for row in list_remarks(rows):
        where = f"{row.system}, budget {row.budget}, batch {row.batch}"
        line = f"{where}: {row.failed or row.note}"
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def list_remarks(rows: Sequence[BenchRow]) -> list[BenchRow]:
    """List rows that failed and rows that deviate from their system's definition."""
    return [row for row in rows if row.failed or row.note]


def make_table(title: str, columns: Columns, rows: Sequence[BenchRow]) -> Table:
    """Make a table with a line per row; budget and batch are written where they change."""
    made = Table(title=title)
    for column in ("budget", "batch", "system"):
        made.add_column(column, no_wrap=True)
    for column in columns:
        made.add_column(column, justify="right", no_wrap=True)
    cell = None
    for row in rows:
        here = row.budget, str(row.batch)
        made.add_row(
            *(here if here != cell else ("", "")),
            row_label(row),
            *(write(row) for write in columns.values()),
        )
        cell = here
    return made


def row_label(row: BenchRow) -> str:
    """Name of the system, marked if it was replayed rather than run."""
    return f"{row.system} (simulated)" if row.simulated else row.system
