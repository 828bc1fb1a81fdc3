"""HTML report of a live comparison, with the papers' figures drawn from this run's rows."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from predictors.units import GIB
from runtime.presets import ON_DEMAND, PROMOE
from runtime.tools.bench.rows import BOUND, BenchRow
from runtime.tools.bench.table import BYTES, SPEED, list_remarks, make_cells, row_label
from runtime.tools.bench.variants import ABLATIONS
from runtime.tools.report.figures import muted_color
from runtime.tools.report.html_report import HtmlReport
from runtime.tools.report.line_labels import label_lines
from runtime.tools.report.provenance import Provenance
from runtime.tools.report.series_styles import line_style, series_style
from runtime.tools.report.spreads import (
    MEDIAN,
    PERCENTILES,
    SPREADS_NOTE,
    draw_spreads,
    spreads_height,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BOUND_LABEL = f"{BOUND} (simulated)"

Series = dict[str, tuple[list[Any], list[float]]]
"""Label to positions on the axis and values."""


def make_report(
    results: dict[str, Any], rows: Sequence[BenchRow], provenance: Provenance | None = None
) -> HtmlReport:
    """Make the report: all tables, and a figure for each comparison in the papers."""
    good = [row for row in rows if not row.failed]
    title = f"Systems side by side, live: {results['model']}"
    page = HtmlReport(title, results["compared"], provenance=provenance)
    page.text("Machine", describe_machine(results))
    page.table("Speed", *make_cells(SPEED, good), note=SPEED_NOTE)
    live = [row for row in good if not row.simulated]
    page.table("Bytes and memory", *make_cells(BYTES, live), note=BYTES_NOTE)
    if remarks := list_remarks(rows):
        cells = [[r.budget, r.batch, row_label(r), r.failed or r.note] for r in remarks]
        page.table("Failures and deviations", ["budget", "batch", "system", "reason"], cells)
    for batch in dict.fromkeys(row.batch for row in good):
        of_batch = [row for row in good if row.batch == batch]
        add_budgets(page, of_batch, batch)
        add_ablation(page, of_batch, batch)
        for budget in dict.fromkeys(row.budget for row in of_batch):
            add_distribution(page, [row for row in of_batch if row.budget == budget], batch, budget)
    add_batches(page, good)
    return page


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


def describe_machine(results: dict[str, Any]) -> list[str]:
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
    return [
        f"{hardware['processor']}, {hardware['cores']} cores, {hardware['threads_used']} threads, "
        f"{hardware['memory_bytes'] / GIB:.0f} GiB of memory; {hardware['system']}. Load average "
        f"at start: {machine['load_average_at_start']}.",
        f"Reads of the model's files past the page cache, one thread: {reads}.",
        f"Versions: {versions}.",
        checked,
    ]


def collect_series(rows: Sequence[BenchRow], axis: str, key: str, scale: float) -> Series:
    """Collect each system's values along an axis, in the order of the rows."""
    series: Series = {}
    for row in rows:
        if getattr(row, key) is not None:
            places, values = series.setdefault(row_label(row), ([], []))
            places.append(str(getattr(row, axis)))
            values.append(getattr(row, key) * scale)
    return series


def draw_series(series: Series, x_label: str, y_label: str) -> Callable[["Figure"], None]:
    """Return a function that draws a line for each system and shades what lies below the bound."""

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        ticks = axis_places([place for places, _ in series.values() for place in places])
        for name, (places, values) in series.items():
            axes.plot([ticks[at] for at in places], values, label=name, **line_style(name))
        axes.set_xticks(list(ticks.values()), list(ticks))
        axes.set(ylim=(0, None), xlabel=x_label, ylabel=y_label)
        if BOUND_LABEL in series:
            places, values = series[BOUND_LABEL]
            x = [ticks[at] for at in places]
            axes.fill_between(x, values, 0, color=muted_color(), alpha=0.13, linewidth=0)
        label_lines(axes)

    return draw


def axis_places(labels: Sequence[str]) -> dict[str, float]:
    """Return the place of each label on the axis: shares to scale, others at equal distances."""
    names = list(dict.fromkeys(labels))
    if all(name.endswith("%") for name in names):
        return {name: float(name[:-1]) for name in names}
    return {name: float(place) for place, name in enumerate(names)}


def long_rows(series: Series) -> list[list[Any]]:
    return [[name, *pair] for name, (x, y) in series.items() for pair in zip(x, y, strict=True)]


def add_budgets(page: HtmlReport, rows: Sequence[BenchRow], batch: int) -> None:
    """Latency against the share of experts in memory (ProMoE, figure 10; fMoE, figure 9)."""
    rows = [row for row in rows if row.system not in ABLATIONS]
    if len({row.budget for row in rows}) < 2:
        return
    for name, key in (("TPOT", "tpot_mean_seconds"), ("TTFT", "ttft_mean_seconds")):
        series = collect_series(rows, "budget", key, 1000)
        page.figure(
            f"{name.lower()}-against-budget-batch-{batch}",
            f"{name} against the memory budget, batch {batch}",
            draw_series(series, "memory for experts, share of all", f"{name}, ms"),
            ["system", "budget", f"{name} ms"],
            long_rows(series),
            note="Means, lower is better. `oracle` knows the routing of each step when it begins. "
            "The shaded area below the bound is out of reach: the transfers that any system needs "
            "that knows all routing, or the computation, on this machine as it was measured.",
            inches=(8.0, 4.8),
        )


def add_batches(page: HtmlReport, rows: Sequence[BenchRow]) -> None:
    """Latency against the batch size (ProMoE, figure 14)."""
    if len({row.batch for row in rows}) < 2:
        return
    for budget in dict.fromkeys(row.budget for row in rows):
        of_budget = [row for row in rows if row.budget == budget]
        series = collect_series(of_budget, "batch", "tpot_mean_seconds", 1000)
        page.figure(
            f"tpot-against-batch-size-{file_label(budget)}",
            f"TPOT against the batch size, budget {budget}",
            draw_series(series, "batch size", "TPOT, ms"),
            ["system", "batch", "TPOT ms"],
            long_rows(series),
        )


def add_distribution(page: HtmlReport, rows: Sequence[BenchRow], batch: int, budget: str) -> None:
    """Add the distribution of the decode steps' times (fMoE, figure 10)."""
    shares = list(range(101))
    series: Series = {
        row_label(row): (shares, [1000 * float(t) for t in np.percentile(row.steps, shares)])
        for row in rows
        if row.steps
    }

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        medians = {name: np.percentile(times, MEDIAN) for name, (_, times) in series.items()}
        spreads = {
            name: [float(time) for time in np.percentile(series[name][1], PERCENTILES)]
            for name in sorted(medians, key=lambda name: medians[name])
        }
        draw_spreads(axes, spreads)
        axes.set_xlabel("time of a decode step, ms")

    page.figure(
        f"tpot-distribution-{file_label(budget)}-batch-{batch}",
        f"Times of the decode steps, budget {budget}, batch {batch}",
        draw,
        ["system", "percent of steps", "ms"],
        long_rows(series),
        note=SPREADS_NOTE,
        inches=(8.0, spreads_height(len(series))),
    )


def add_ablation(page: HtmlReport, rows: Sequence[BenchRow], batch: int) -> None:
    """ProMoE without each of its techniques (ProMoE, figure 12)."""
    names = [ON_DEMAND, PROMOE, *ABLATIONS]
    kept = [row for row in rows if row.system in names]
    if not any(row.system in ABLATIONS for row in kept):
        return
    series = collect_series(kept, "budget", "tpot_seconds", 1000)
    budgets = list(dict.fromkeys(row.budget for row in kept))

    def draw(figure: "Figure") -> None:
        panels = figure.subplots(1, len(budgets), squeeze=False, sharey=True)[0]
        for axes, budget in zip(panels, budgets, strict=True):
            for row, (name, (places, values)) in enumerate(series.items()):
                if budget in places:
                    time = values[places.index(budget)]
                    bar = axes.barh(row, time, 0.66, color=series_style(name).color)
                    axes.bar_label(bar, fmt="%.3g", fontsize=9, padding=3)
            axes.set(title=f"budget {budget}", xlabel="TPOT, ms", xlim=(0, None))
            axes.set_xmargin(0.14)
            axes.grid(visible=False, axis="y")
        panels[0].set_yticks(range(len(series)), list(series))
        panels[0].invert_yaxis()

    page.figure(
        f"tpot-without-each-technique-batch-{batch}",
        f"TPOT of promoe without each technique, batch {batch}",
        draw,
        ["system", "budget", "TPOT ms"],
        long_rows(series),
        note="Medians, lower is better; techniques as in ProMoE, figure 12.",
        inches=(max(8.0, 3.0 * len(budgets)), 1.2 + 0.36 * len(series)),
    )


def file_label(budget: str) -> str:
    return budget.replace("%", "pct").replace(".", "_")
