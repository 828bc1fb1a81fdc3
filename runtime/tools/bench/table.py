"""Print the comparison as tables in the terminal."""

from collections.abc import Sequence

from rich.console import Console

from predictors.table import Table
from runtime.tools.bench.rows import BenchRow
from runtime.tools.intervals import Interval
from runtime.tools.report.tables import (
    FigureColumn,
    decimals,
    percent,
    speed_up,
    whole_mebibytes,
)


def seconds_as_ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f}"


def interval_as_ms(interval: Interval) -> str:
    return f"{1000 * interval[0]:.1f} to {1000 * interval[1]:.1f}"


SPEED = (
    FigureColumn("mean TPOT", "tpot_mean_seconds", seconds_as_ms),
    FigureColumn("95 %", "tpot_interval_seconds", interval_as_ms),
    FigureColumn("TPOT", "tpot_seconds", seconds_as_ms),
    FigureColumn("p95", "tpot_p95_seconds", seconds_as_ms),
    FigureColumn("p99", "tpot_p99_seconds", seconds_as_ms),
    FigureColumn("speed-up", "tpot_speed_up", speed_up),
    FigureColumn("TTFT", "ttft_seconds", seconds_as_ms),
    FigureColumn("TTFT speed-up", "ttft_speed_up", speed_up),
    FigureColumn("tokens/s", "tokens_per_second", decimals),
    FigureColumn("hits", "decode_hit_rate", percent),
    FigureColumn("stalled", "decode_stall_share", percent),
    FigureColumn("predictor", "decode_predictor_share", percent),
)
"""Times in ms, medians unless named otherwise; 95 %: interval of the mean; speed-up: on-demand's
time divided by this one's; hits and shares are of decode steps."""
SPEED_IMPORTANCE = (
    "TPOT",
    "mean TPOT",
    "speed-up",
    "hits",
    "tokens/s",
    "TTFT",
    "stalled",
    "95 %",
    "p95",
    "p99",
)
BYTES = (
    FigureColumn("moved", "bytes_moved", whole_mebibytes),
    FigureColumn("wasted", "bytes_wasted", whole_mebibytes),
    FigureColumn("late", "bytes_late", whole_mebibytes),
    FigureColumn("per step", "bytes_moved_per_decode_step", whole_mebibytes),
    FigureColumn("read, MiB/s", "read_bytes_per_second", whole_mebibytes),
    FigureColumn("link busy", "decode_link_share", percent),
    FigureColumn("memory", "peak_memory_bytes", whole_mebibytes),
    FigureColumn("overhead", "memory_beside_bytes", whole_mebibytes),
    FigureColumn("page cache", "left_in_page_cache", whole_mebibytes),
)
"""MiB; memory: the process's peak; overhead: peak memory less weights and arena; page cache: bytes
of the model's files that the run left there."""
BYTES_IMPORTANCE = ("memory", "moved", "per step", "wasted", "late", "overhead")


def print_tables(console: Console, title: str, rows: Sequence[BenchRow]) -> None:
    """Print speed, then bytes and memory, then notes and failures."""
    good = [row for row in rows if not row.failed]
    speed = f"{title}: ms, speed-up over on-demand, shares of decode steps"
    make_table(speed, SPEED, good, SPEED_IMPORTANCE).print(console)
    live = [row for row in good if not row.simulated]
    memory = f"{title}: bytes and memory, MiB per run and per decode step"
    make_table(memory, BYTES, live, BYTES_IMPORTANCE).print(console)
    for row in list_remarks(rows):
        where = f"{row.system}, budget {row.budget}, batch {row.batch}"
        line = f"{where}: {row.failed or row.note}"
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def list_remarks(rows: Sequence[BenchRow]) -> list[BenchRow]:
    """List rows that failed and rows that deviate from their system's definition."""
    return [row for row in rows if row.failed or row.note]


def make_table(
    title: str,
    columns: Sequence[FigureColumn],
    rows: Sequence[BenchRow],
    importance: Sequence[str],
) -> Table:
    """Make a table with a line per row; budget and batch are written where they change."""
    headings, body = make_cells(columns, rows)
    return Table.of(
        headings,
        body,
        title=title,
        left=3,
        importance=importance,
        elsewhere="results.json and report.html have them",
    )


def make_cells(
    columns: Sequence[FigureColumn], rows: Sequence[BenchRow]
) -> tuple[list[str], list[list[str]]]:
    """Make the headings and the cells of a table with a line per row."""
    return ["budget", "batch", "system", *(column.heading for column in columns)], [
        [row.budget, str(row.batch), row_label(row), *(column.text(row) for column in columns)]
        for row in rows
    ]


def row_label(row: BenchRow) -> str:
    """Name of the system, marked if it was replayed rather than run."""
    return f"{row.system} (simulated)" if row.simulated else row.system
