"""Rows of the comparison: medians over repetitions, means over all steps, speed-ups in pairs.

And their tables, in the terminal and in the report.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from rich.console import Console

from predictors.table import Table, TableColumn, decimals, interval, mebibytes, percent, times
from runtime.config import SystemConfig
from runtime.presets import ON_DEMAND
from runtime.tools.bench.tasks import CaseOutcome, ServedRun, find_replayed
from runtime.tools.comparison import Condition
from runtime.tools.intervals import Interval, mean_interval
from runtime.tools.report.series_styles import BOUND, SIMULATED


@dataclass(kw_only=True)
class BenchRow:
    """A case's figures; times in seconds, sizes in bytes, shares of 1, None where not measured."""

    budget: str
    batch: int
    system: str
    simulated: bool = False
    failed: str | None = None
    """The reason why there are no figures."""
    note: str | None = None
    """Deviation of the runs from the system's definition."""
    predictor: str | None = None
    reuse_predictor: str | None = None
    adaptive_prefetch: dict[str, Any] | None = None
    ttft_seconds: float | None = None
    ttft_speed_up: float | None = None
    """On-demand's time divided by this one's."""
    ttft_mean_seconds: float | None = None
    tpot_seconds: float | None = None
    tpot_mean_seconds: float | None = None
    """Mean of all decode steps of all runs."""
    tpot_interval_seconds: Interval | None = None
    """95 % interval of that mean, over all requests of all runs."""
    num_requests: int | None = None
    """Measured requests of all runs."""
    tpot_speed_up: float | None = None
    tpot_p95_seconds: float | None = None
    tpot_p99_seconds: float | None = None
    tpot_of_runs: list[float] | None = None
    steps: list[float] | None = None
    """Times of all decode steps of all runs."""
    tokens_per_second: float | None = None
    decode_hit_rate: float | None = None
    prefill_hit_rate: float | None = None
    decode_stall_share: float | None = None
    decode_predictor_share: float | None = None
    decode_link_share: float | None = None
    bytes_moved: float | None = None
    bytes_wasted: float | None = None
    bytes_late: float | None = None
    bytes_moved_per_decode_step: float | None = None
    read_bytes_per_second: float | None = None
    peak_memory_bytes: float | None = None
    memory_beside_bytes: float | None = None
    """Peak memory less weights and arena."""
    left_in_page_cache: float | None = None
    arena_bytes: int | None = None
    arena_slots: int | None = None
    weights_bytes: int | None = None

    @property
    def condition(self) -> tuple[str, int]:
        return self.budget, self.batch


FIGURES: dict[str, Callable[[ServedRun], float | None]] = {
    "ttft_seconds": lambda run: statistics.median(run.ttft_seconds),
    "ttft_mean_seconds": lambda run: statistics.mean(run.ttft_seconds),
    "tpot_seconds": lambda run: statistics.median(run.tpot_seconds),
    "tokens_per_second": lambda run: count_measured_tokens(run) / run.wall_seconds,
    "decode_hit_rate": lambda run: ratio(run.decode["hits"], run.decode["requests"]),
    "prefill_hit_rate": lambda run: ratio(run.prefill["hits"], run.prefill["requests"]),
    "decode_stall_share": lambda run: decode_share(run, "stall_seconds"),
    "decode_predictor_share": lambda run: decode_share(run, "predictor_seconds"),
    "decode_link_share": lambda run: decode_share(run, "link_seconds"),
    "bytes_moved": lambda run: sum_phases(run, "bytes_moved"),
    "bytes_wasted": lambda run: sum_phases(run, "bytes_wasted"),
    "bytes_late": lambda run: sum_phases(run, "bytes_late"),
    "bytes_moved_per_decode_step": lambda run: run.decode["bytes_moved"] / len(run.tpot_seconds),
    "read_bytes_per_second": lambda run: ratio(
        sum_phases(run, "bytes_moved"), sum_phases(run, "link_seconds")
    ),
    "peak_memory_bytes": lambda run: run.peak_memory_bytes,
    "memory_beside_bytes": lambda run: run.peak_memory_bytes - run.weights_bytes - run.arena_bytes,
    "left_in_page_cache": lambda run: run.page_cache_bytes,
}
"""Figures of a run, of which a row has the median."""


def make_rows(outcomes: Sequence[CaseOutcome]) -> list[BenchRow]:
    """Make a row for each case, in the order of the cases."""
    baselines = {
        outcome.case.condition: outcome.runs
        for outcome in outcomes
        if outcome.case.variant.label == ON_DEMAND
    }
    return [make_row(outcome, baselines) for outcome in outcomes]


def make_row(outcome: CaseOutcome, baselines: dict[Condition, list[ServedRun]]) -> BenchRow:
    """Summarise one case's runs; `baselines` are on-demand's runs in each condition."""
    case, runs = outcome.case, outcome.runs
    row = BenchRow(
        budget=case.condition.budget, batch=case.condition.batch, system=case.variant.label
    )
    if outcome.failed is not None or not runs:
        row.failed = outcome.failed
        return row
    for name, figure in FIGURES.items():
        setattr(row, name, median_of_known([figure(run) for run in runs]))
    add_steps(row, [seconds for run in runs for seconds in run.tpot_seconds])
    means = [mean for run in runs for mean in request_means(run)]
    row.tpot_interval_seconds, row.num_requests = mean_interval(means), len(means)
    row.tpot_of_runs = [statistics.median(run.tpot_seconds) for run in runs]
    pairs = list(zip(runs, baselines.get(case.condition, []), strict=False))
    for name in ("tpot", "ttft"):
        times = FIGURES[f"{name}_seconds"]
        ratios = [speed_up(times(base), times(run)) for run, base in pairs]
        setattr(row, f"{name}_speed_up", median_of_known(ratios))
    first = runs[0]
    row.predictor, row.reuse_predictor = first.predictor, first.reuse_predictor
    row.note, row.adaptive_prefetch = first.note, runs[-1].adaptive_prefetch
    row.arena_bytes, row.arena_slots = first.arena_bytes, first.arena_slots
    row.weights_bytes = first.weights_bytes
    return row


def add_steps(row: BenchRow, steps: list[float]) -> None:
    """Add the times of all decode steps, their mean and their slowest."""
    row.steps, row.tpot_mean_seconds = steps, statistics.fmean(steps)
    row.tpot_p95_seconds, row.tpot_p99_seconds = map(float, np.percentile(steps, (95, 99)))


def request_means(run: ServedRun) -> list[float]:
    """Return the mean time of a decode step of each measured request; all have equally many."""
    times = np.reshape(run.tpot_seconds, (len(run.ttft_seconds), -1))
    return [float(mean) for mean in times.mean(axis=1)]


def count_measured_tokens(run: ServedRun) -> int:
    """Count new tokens of the measured requests, which come last."""
    measured = run.tokens[-len(run.ttft_seconds) :]
    return sum(len(row) for request in measured for row in request)


def sum_phases(run: ServedRun, counter: str) -> float:
    return run.prefill[counter] + run.decode[counter]


def decode_share(run: ServedRun, counter: str) -> float:
    return run.decode[counter] / sum(run.tpot_seconds)


def ratio(part: float, whole: float) -> float | None:
    """Divide; None for a whole of 0."""
    return part / whole if whole else None


def median_of_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def compare_simulated(rows: Sequence[BenchRow], live: Sequence[BenchRow]) -> list[BenchRow]:
    """Add speed-ups over on-demand's live runs to simulated rows."""
    on_demand = {
        row.condition: row for row in live if row.system == ON_DEMAND and row.failed is None
    }
    for row in rows:
        base = on_demand.get(row.condition)
        if base is not None and row.failed is None:
            row.tpot_speed_up = speed_up(base.tpot_seconds, row.tpot_seconds)
            row.ttft_speed_up = speed_up(base.ttft_seconds, row.ttft_seconds)
    return list(rows)


def speed_up(base: float | None, own: float | None) -> float | None:
    """Divide the baseline's time by the own one; None if one was not measured."""
    return base / own if base is not None and own else None


def simulated_rows(
    condition: Condition, systems: Iterable[SystemConfig], failed: str | None = None
) -> list[BenchRow]:
    """Make rows without figures: of the systems that know the future, and last of the bound.

    It has the mean times that no system can beat (`runtime.sim.lower_bound`).
    """
    names = [*(system.name for system in find_replayed(systems)), BOUND]
    return [
        BenchRow(
            budget=condition.budget,
            batch=condition.batch,
            system=name,
            simulated=True,
            failed=failed,
        )
        for name in names
    ]


def row_label(row: BenchRow) -> str:
    """Name of the system, marked if it was replayed rather than run."""
    return f"{row.system}{SIMULATED}" if row.simulated else row.system


def sort_by_condition(rows: Sequence[BenchRow]) -> list[BenchRow]:
    """Group rows by condition, in the order of first appearance, live ones first."""
    order: dict[tuple[str, int], int] = {}
    for row in rows:
        order.setdefault(row.condition, len(order))
    return sorted(rows, key=lambda row: (order[row.condition], row.simulated))


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
