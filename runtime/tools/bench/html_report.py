"""HTML report of a live comparison, with the papers' figures drawn from this run's rows."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from predictors.units import GIB
from runtime.policy.systems import ON_DEMAND, PROMOE
from runtime.tools.bench.rows import BenchRow
from runtime.tools.bench.table import BYTES, SPEED, list_remarks, make_cells, row_label
from runtime.tools.bench.variants import ABLATIONS
from runtime.tools.report.html_report import HtmlReport
from runtime.tools.report.line_styles import system_styles

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Series = dict[str, tuple[list[Any], list[float]]]
"""Label to positions on the axis and values."""


def make_report(results: dict[str, Any], rows: Sequence[BenchRow]) -> HtmlReport:
    """Make the report: all tables, and a figure for each comparison in the papers."""
    good = [row for row in rows if not row.failed]
    page = HtmlReport(f"Systems side by side, live: {results['model']}", results["compared"])
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
            add_cdf(page, [row for row in of_batch if row.budget == budget], batch, budget)
    add_batches(page, good)
    return page


SPEED_NOTE = (
    "Times in ms, medians of the repetitions; p95 and p99 over all decode steps; speed-up: "
    "on-demand's time divided by this one's, within a repetition. Hits, stalls and time in "
    "the predictor: of decode steps. Simulated rows replay this run's own routing on this machine "
    "as measured, with the routing known in advance."
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
    found: Series = {}
    for row in rows:
        if getattr(row, key) is not None:
            places, values = found.setdefault(row_label(row), ([], []))
            places.append(str(getattr(row, axis)))
            values.append(getattr(row, key) * scale)
    return found


def draw_lines(found: Series, x_label: str, y_label: str) -> Callable[["Figure"], None]:
    """Return a function that draws a line for each system."""

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        styles = label_styles(found)
        for name, (places, values) in found.items():
            axes.plot(places, values, label=name, **styles[name])
        axes.set_ylim(bottom=0)
        label_axes(axes, x_label, y_label)

    return draw


def label_axes(axes: "Axes", x_label: str, y_label: str) -> None:
    """Label both axes and put the legend on their right."""
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))


def label_styles(labels: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the style of each system's line, as in the report of `train.evaluate`."""
    return system_styles(
        list(labels),
        ours="moecast",
        subject=PROMOE,
        baseline=ON_DEMAND,
        bound="oracle (simulated)",
    )


def long_rows(found: Series) -> list[list[Any]]:
    return [[name, *pair] for name, (x, y) in found.items() for pair in zip(x, y, strict=True)]


def add_budgets(page: HtmlReport, rows: Sequence[BenchRow], batch: int) -> None:
    """Latency against the share of experts in memory (ProMoE, figure 10; fMoE, figure 9)."""
    if len({row.budget for row in rows}) < 2:
        return
    for name, key in (("TPOT", "tpot_seconds"), ("TTFT", "ttft_seconds")):
        found = collect_series(rows, "budget", key, 1000)
        page.figure(
            f"{name.lower()}-budget-batch-{batch}",
            f"{name} against the budget, batch {batch}",
            draw_lines(found, "memory for experts", f"{name}, ms"),
            ["system", "budget", f"{name} ms"],
            long_rows(found),
        )


def add_batches(page: HtmlReport, rows: Sequence[BenchRow]) -> None:
    """Latency against the batch size (ProMoE, figure 14)."""
    if len({row.batch for row in rows}) < 2:
        return
    for budget in dict.fromkeys(row.budget for row in rows):
        of_budget = [row for row in rows if row.budget == budget]
        found = collect_series(of_budget, "batch", "tpot_seconds", 1000)
        page.figure(
            f"tpot-batch-{file_label(budget)}",
            f"TPOT against the batch size, budget {budget}",
            draw_lines(found, "batch size", "TPOT, ms"),
            ["system", "batch", "TPOT ms"],
            long_rows(found),
        )


def add_cdf(page: HtmlReport, rows: Sequence[BenchRow], batch: int, budget: str) -> None:
    """Add the distribution of the decode steps' times (fMoE, figure 10)."""
    shares = list(range(0, 101, 2))
    found: Series = {
        row_label(row): (shares, [1000 * float(t) for t in np.percentile(row.steps, shares)])
        for row in rows
        if row.steps
    }

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        styles = label_styles(found)
        for name, (_, times) in found.items():
            axes.plot(times, shares, label=name, **{**styles[name], "marker": None})
        axes.set_xlim(left=0)
        label_axes(axes, "decode step, ms", "% of steps")

    page.figure(
        f"cdf-{file_label(budget)}-batch-{batch}",
        f"Decode steps' times, budget {budget}, batch {batch}",
        draw,
        ["system", "share of steps", "ms"],
        long_rows(found),
    )


def add_ablation(page: HtmlReport, rows: Sequence[BenchRow], batch: int) -> None:
    """ProMoE without each of its techniques (ProMoE, figure 12)."""
    names = [ON_DEMAND, PROMOE, *ABLATIONS]
    kept = [row for row in rows if row.system in names]
    if not any(row.system in ABLATIONS for row in kept):
        return
    found = collect_series(kept, "budget", "tpot_seconds", 1000)
    budgets = list(dict.fromkeys(row.budget for row in kept))

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        width = 0.8 / len(found)
        for i, (name, (places, values)) in enumerate(found.items()):
            x = [budgets.index(place) + width * (i - (len(found) - 1) / 2) for place in places]
            axes.bar(x, values, width * 0.9, color=f"C{i}", label=name)
        axes.set_xticks(range(len(budgets)), budgets)
        label_axes(axes, "memory for experts", "TPOT, ms")

    page.figure(
        f"ablation-batch-{batch}",
        f"promoe without each technique, batch {batch}",
        draw,
        ["system", "budget", "TPOT ms"],
        long_rows(found),
    )


def file_label(budget: str) -> str:
    return budget.replace("%", "pct").replace(".", "_")
