"""The tables of the comparison, in the terminal and in the report."""

from collections.abc import Sequence
from functools import partial

from rich.console import Console

from predictors.table import (
    Table,
    TableColumn,
    decimals,
    interval,
    mebibytes,
    percent,
    times,
)
from runtime.tools.bench.rows import BenchRow, row_label


def seconds_as_ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f}"


whole_mebibytes = partial(mebibytes, digits=0)

CASE = (TableColumn("budget"), TableColumn("batch"), TableColumn("system", row_label))
SPEED = (
    *CASE,
    TableColumn("mean TPOT", "tpot_mean_seconds", seconds_as_ms, rank=2),
    TableColumn("95 %", "tpot_interval_seconds", partial(interval, write=seconds_as_ms), rank=8),
    TableColumn("median", "tpot_seconds", seconds_as_ms, rank=1),
    TableColumn("p95", "tpot_p95_seconds", seconds_as_ms, rank=9),
    TableColumn("p99", "tpot_p99_seconds", seconds_as_ms, rank=10),
    TableColumn("speed-up", "tpot_speed_up", times, rank=3),
    TableColumn("TTFT", "ttft_seconds", seconds_as_ms, rank=6),
    TableColumn("TTFT speed-up", "ttft_speed_up", times),
    TableColumn("tokens/s", "tokens_per_second", decimals, rank=5),
    TableColumn("hits", "decode_hit_rate", percent, rank=4),
    TableColumn("stalled", "decode_stall_share", percent, rank=7),
    TableColumn("predictor", "decode_predictor_share", percent),
)
"""Times in ms, medians unless named otherwise; 95 %: interval of the mean; speed-up: on-demand's
time divided by this one's; hits and shares are of decode steps."""
BYTES = (
    *CASE,
    TableColumn("moved", "bytes_moved", whole_mebibytes, rank=2),
    TableColumn("wasted", "bytes_wasted", whole_mebibytes, rank=4),
    TableColumn("late", "bytes_late", whole_mebibytes, rank=5),
    TableColumn("per step", "bytes_moved_per_decode_step", whole_mebibytes, rank=3),
    TableColumn("read, MiB/s", "read_bytes_per_second", whole_mebibytes),
    TableColumn("link busy", "decode_link_share", percent),
    TableColumn("memory", "peak_memory_bytes", whole_mebibytes, rank=1),
    TableColumn("overhead", "memory_beside_bytes", whole_mebibytes, rank=6),
    TableColumn("page cache", "left_in_page_cache", whole_mebibytes),
)
"""MiB; memory: the process's peak; overhead: peak memory less weights and arena; page cache: bytes
of the model's files that the run left there."""
REMARKS = (*CASE, TableColumn("reason", lambda row: row.failed or row.note))


def make_table(columns: Sequence[TableColumn], rows: Sequence[BenchRow], title: str = "") -> Table:
    """Make a table with a line per row."""
    elsewhere = "results.json and report.html have them"
    return Table(columns=columns, rows=rows, title=title, left=len(CASE), elsewhere=elsewhere)


def print_tables(console: Console, title: str, rows: Sequence[BenchRow]) -> None:
    """Print speed, then bytes and memory, then notes and failures."""
    good = [row for row in rows if not row.failed]
    speed = f"{title}: ms, speed-up over on-demand, shares of decode steps"
    make_table(SPEED, good, speed).print(console)
    live = [row for row in good if not row.simulated]
    memory = f"{title}: bytes and memory, MiB per run and per decode step"
    make_table(BYTES, live, memory).print(console)
    for row in list_remarks(rows):
        where = f"{row.system}, budget {row.budget}, batch {row.batch}"
        line = f"{where}: {row.failed or row.note}"
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def list_remarks(rows: Sequence[BenchRow]) -> list[BenchRow]:
    """List rows that failed and rows that deviate from their system's definition."""
    return [row for row in rows if row.failed or row.note]
