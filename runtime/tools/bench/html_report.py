"""HTML report of a live comparison, with the papers' figures drawn from this run's rows."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from predictors.table import Table, TableColumn
from predictors.units import GIB
from runtime.presets import ON_DEMAND, PROMOE
from runtime.tools.bench.rows import (
    BYTES,
    REMARKS,
    SPEED,
    BenchRow,
    list_remarks,
    make_table,
    row_label,
)
from runtime.tools.bench.tasks import ABLATIONS
from runtime.tools.report.figures import (
    SPREADS_NOTE,
    Draw,
    collect,
    draw_bars,
    draw_panels,
    draw_spreads,
    pick_spreads,
    rows_height,
    split,
    wide,
)
from runtime.tools.report.html_report import HtmlReport
from runtime.tools.report.provenance import Provenance

SPEED_NOTE = (
    "Times in ms, medians of the repetitions; mean TPOT, p95 and p99 over all decode steps, with "
    "the mean's 95 % interval over the requests of all repetitions; speed-up: "
    "on-demand's time divided by this one's, within a repetition. Hits, stalls and time in "
    "the predictor: of decode steps. Simulated rows are for this run's own routing on this machine "
    "as measured: `oracle` knows a step's routing when it begins; the bound is a mean time that no "
    "system can beat."
)
BYTES_NOTE = (
    "MiB, medians. Moved, wasted (prefetched and evicted unused) and late (prefetched "
    "but still in transfer when requested): of a run's measured requests. Link busy: two readers, "
    "the link's thread and the waiting computation, make up to 200 %. Overhead: the process's "
    "peak memory less its weights and its arena. Page cache: bytes of the model's files that a "
    "run left there."
)


def make_report(
    results: dict[str, Any], rows: Sequence[BenchRow], provenance: Provenance | None = None
) -> HtmlReport:
    """Make the report: all tables, and a figure for each comparison in the papers."""
    good = [row for row in rows if not row.failed]
    title = f"Systems side by side, live: {results['model']}"
    report = HtmlReport(title, results["compared"], provenance=provenance)
    report.add("Machine", note=describe_machine(results))
    report.add("Speed", make_table(SPEED, good), note=SPEED_NOTE)
    live = [row for row in good if not row.simulated]
    report.add("Bytes and memory", make_table(BYTES, live), note=BYTES_NOTE)
    if remarks := list_remarks(rows):
        report.add("Failures and deviations", make_table(REMARKS, remarks))
    for batch in dict.fromkeys(row.batch for row in good):
        of_batch = [row for row in good if row.batch == batch]
        add_budgets(report, of_batch, batch)
        add_ablation(report, of_batch, batch)
        for budget in dict.fromkeys(row.budget for row in of_batch):
            own = [row for row in of_batch if row.budget == budget]
            add_distribution(report, own, batch, budget)
    add_batches(report, good)
    return report


def describe_machine(results: dict[str, Any]) -> str:
    """Describe processor, memory, disk, versions and the load of the machine."""
    machine = results["machine"]
    hardware = machine["hardware"]
    reads = ", ".join(
        f"{row['read_bytes'] // 1024} KiB {row['direct'] / GIB:.2f} GiB/s"
        for row in machine["disk"]
        if row["direct"]
    )
    versions = ", ".join(f"{k} {v}" for k, v in machine["versions"].items() if v)
    checked = (
        "All tokens of all systems equal those of plain Transformers."
        if results["equal_to_plain_transformers"]
        else "All systems generated the same tokens."
    )
    return (
        f"{hardware['processor']}, {hardware['cores']} cores, {hardware['threads_used']} threads, "
        f"{hardware['memory_bytes'] / GIB:.0f} GiB of memory; {hardware['system']}. Load average "
        f"at start: {machine['load_average_at_start']}.\n"
        f"Reads of the model's files past the page cache, one thread: {reads}.\n"
        f"Versions: {versions}.\n{checked}"
    )


def time_table(rows: Sequence[BenchRow], axis: str, key: str, heading: str) -> Table:
    """Make the table of a time in ms of each system along an axis, of rows that have it."""
    columns = [
        TableColumn("system", row_label),
        TableColumn(axis),
        TableColumn(heading, lambda row: 1000 * getattr(row, key)),
    ]
    return Table(columns=columns, rows=[row for row in rows if getattr(row, key) is not None])


def draw_times(axis: str, heading: str, xlabel: str, ylabel: str) -> Draw:
    """Return a function that draws a line for each system and shades what lies below the bound."""
    return lambda figure, records: draw_panels(
        figure,
        {"": collect(records, axis, heading, by="system")},
        xlabel=xlabel,
        ylabel=ylabel,
        labels=True,
        ylim=(0, None),
    )


def add_budgets(report: HtmlReport, rows: Sequence[BenchRow], batch: int) -> None:
    """Latency against the share of experts in memory (ProMoE, figure 10; fMoE, figure 9)."""
    rows = [row for row in rows if row.system not in ABLATIONS]
    if len({row.budget for row in rows}) < 2:
        return
    for name in ("TPOT", "TTFT"):
        heading, ylabel = f"{name} ms", f"{name}, ms"
        report.add(
            f"{name} against the memory budget, batch {batch}",
            time_table(rows, "budget", f"{name.lower()}_mean_seconds", heading),
            draw=draw_times("budget", heading, "memory for experts, share of all", ylabel),
            name=f"{name.lower()}-against-budget-batch-{batch}",
            note="Means, lower is better. `oracle` knows the routing of each step when it begins. "
            "The shaded area below the bound is out of reach: the transfers that any system needs "
            "that knows all routing, or the computation, on this machine as it was measured.",
            inches=(8.0, 4.8),
        )


def add_batches(report: HtmlReport, rows: Sequence[BenchRow]) -> None:
    """Latency against the batch size (ProMoE, figure 14)."""
    if len({row.batch for row in rows}) < 2:
        return
    for budget in dict.fromkeys(row.budget for row in rows):
        own = [row for row in rows if row.budget == budget]
        report.add(
            f"TPOT against the batch size, budget {budget}",
            time_table(own, "batch", "tpot_mean_seconds", "TPOT ms"),
            draw=draw_times("batch", "TPOT ms", "batch size", "TPOT, ms"),
            name=f"tpot-against-batch-size-{file_label(budget)}",
        )


def add_distribution(report: HtmlReport, rows: Sequence[BenchRow], batch: int, budget: str) -> None:
    """Add the distribution of the decode steps' times (fMoE, figure 10)."""
    values = [
        (row_label(row), percent, 1000 * float(time))
        for row in rows
        if row.steps
        for percent, time in enumerate(np.percentile(row.steps, range(101)))
    ]
    report.add(
        f"Times of the decode steps, budget {budget}, batch {batch}",
        Table.of(["system", "percent of steps", "ms"], values),
        draw=lambda figure, records: draw_spreads(
            figure, {"": pick_spreads(records, "ms")}, xlabel="time of a decode step, ms"
        ),
        name=f"tpot-distribution-{file_label(budget)}-batch-{batch}",
        note=SPREADS_NOTE,
        inches=(8.0, rows_height(len(rows))),
    )


def add_ablation(report: HtmlReport, rows: Sequence[BenchRow], batch: int) -> None:
    """ProMoE without each of its techniques (ProMoE, figure 12)."""
    kept = [row for row in rows if row.system in (ON_DEMAND, PROMOE, *ABLATIONS)]
    if not any(row.system in ABLATIONS for row in kept):
        return
    budgets = {row.budget for row in kept}
    report.add(
        f"TPOT of promoe without each technique, batch {batch}",
        time_table(kept, "budget", "tpot_seconds", "TPOT ms"),
        draw=lambda figure, records: draw_bars(
            figure,
            {
                f"budget {budget}": {row["system"]: row["TPOT ms"] for row in own}
                for budget, own in split(records, "budget").items()
            },
            xlabel="TPOT, ms",
        ),
        name=f"tpot-without-each-technique-batch-{batch}",
        note="Medians, lower is better; techniques as in ProMoE, figure 12.",
        inches=(wide(len(budgets)), rows_height(len(kept) // len(budgets))),
    )


def file_label(budget: str) -> str:
    return budget.replace("%", "pct").replace(".", "_")
