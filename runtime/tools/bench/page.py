"""The comparison as a page: the papers' figures, drawn from this run's rows."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from predictors.units import GIB
from runtime.systems import ON_DEMAND, PROMOE
from runtime.tools.bench.show import BYTES, SPEED, Cellwise, label, remarks
from runtime.tools.bench.variants import ABLATIONS
from runtime.tools.report.page import Page

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = dict[str, Any]
Series = dict[str, tuple[list[str], list[float]]]
"""Label to places on the axis and values."""
EMPHASISED = (ON_DEMAND, PROMOE, "moecast", "oracle (simulated)")
"""Lines in colour; the others stand behind them."""


def page_of(results: dict[str, Any]) -> Page:
    """Tables of everything, and a figure for each question that the papers ask."""
    rows: list[Row] = results["rows"]
    good = [row for row in rows if not row.get("failed")]
    page = Page(f"Systems side by side, live: {results['model']}", results["compared"])
    page.text("Where it was run", machine_lines(results))
    page.table("Speed", *cells_of(SPEED, good), note=SPEED_NOTE)
    page.table("Bytes and memory", *cells_of(BYTES, [r for r in good if not r["simulated"]]),
               note=BYTES_NOTE)  # fmt: skip
    said = remarks(rows)
    if said:
        columns = ["budget", "batch", "system", "why"]
        page.table(
            "What did not run, or not as its name says",
            columns,
            [[r["budget"], r["batch"], label(r), r.get("failed") or r["note"]] for r in said],
        )
    for batch in dict.fromkeys(row["batch"] for row in good):
        of_batch = [row for row in good if row["batch"] == batch]
        add_budgets(page, of_batch, batch)
        add_ablation(page, of_batch, batch)
        for budget in dict.fromkeys(row["budget"] for row in of_batch):
            add_cdf(page, [row for row in of_batch if row["budget"] == budget], batch, budget)
    add_batches(page, good)
    return page


SPEED_NOTE = (
    "Times in ms, medians of the repetitions; p95 and p99 over all decode steps; `x`: on-demand's "
    "time over this one's, within a repetition (TPOT, then TTFT). Hits, stalls and time in the "
    "predictor: of decode steps. Simulated rows replay this run's own routing on this machine as "
    "measured, knowing it beforehand: no system can be faster."
)
BYTES_NOTE = (
    "MiB, medians. Moved, wasted (fetched on a forecast and dropped unused) and late (forecast, "
    "but still under way when asked for): of a run's measured requests. Link busy: two readers, "
    "the link's thread and the waiting computation, make up to 200 %. Beside: the process's "
    "peak memory less its weights and its budget. Page cache: what a run left there of the "
    "model's files."
)


def machine_lines(results: dict[str, Any]) -> list[str]:
    """Processor, memory, disk, versions, and whether the machine was quiet."""
    machine = results["machine"]
    hardware = machine["hardware"]
    reads = ", ".join(
        f"{row['read_bytes'] // 1024} KiB {row['direct'] / GIB:.2f} GiB/s"
        for row in machine["disk"]
        if row["direct"]
    )
    versions = ", ".join(f"{k} {v}" for k, v in machine["versions"].items() if v)
    checked = (
        "Every token of every system equals plain Transformers'."
        if results["equal_to_plain_transformers"]
        else "Every system gave the same tokens."
    )
    return [
        f"{hardware['processor']}, {hardware['cores']} cores, {hardware['threads_used']} threads, "
        f"{hardware['memory_bytes'] / GIB:.0f} GiB of memory; {hardware['system']}. Load average "
        f"when it began: {machine['load_average_at_start']}.",
        f"Reads of the model's files past the page cache, one thread: {reads}.",
        f"Versions: {versions}.",
        checked,
    ]


def cells_of(columns: Cellwise, rows: Sequence[Row]) -> tuple[list[str], list[list[Any]]]:
    """As in the terminal."""
    return (
        ["budget", "batch", "system", *columns],
        [
            [row["budget"], row["batch"], label(row), *(write(row) for write in columns.values())]
            for row in rows
        ],
    )


def series(rows: Sequence[Row], axis: str, key: str, scale: float) -> Series:
    """For each system its values along an axis, in the rows' order."""
    found: Series = {}
    for row in rows:
        if row.get(key) is not None:
            places, values = found.setdefault(label(row), ([], []))
            places.append(str(row[axis]))
            values.append(row[key] * scale)
    return found


def lines_of(found: Series, x_label: str, y_label: str) -> Callable[["Figure"], None]:
    """A line for each system; those that matter most on top."""
    emphasised = [name for name in EMPHASISED if name in found]
    others = [name for name in found if name not in emphasised]

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        for i, name in enumerate(others):
            axes.plot(*found[name], color=f"C{(i + 4) % 8}", alpha=0.45, linewidth=1, label=name)
        for i, name in enumerate(emphasised):
            dashed = "--" if "simulated" in name else "-"
            axes.plot(*found[name], dashed, marker="o", color=f"C{i}", label=name)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.set_ylim(bottom=0)
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))

    return draw


def long(found: Series) -> list[list[Any]]:
    return [[name, *pair] for name, (x, y) in found.items() for pair in zip(x, y, strict=True)]


def add_budgets(page: Page, rows: Sequence[Row], batch: int) -> None:
    """Latency against the share of experts in memory (promoe figure 10, fmoe figure 9)."""
    if len({row["budget"] for row in rows}) < 2:
        return
    for name, key in (("TPOT", "tpot_seconds"), ("TTFT", "ttft_seconds")):
        found = series(rows, "budget", key, 1000)
        page.figure(
            f"{name.lower()}-budget-batch-{batch}",
            f"{name} against the budget, batch {batch}",
            lines_of(found, "memory for experts", f"{name}, ms"),
            ["system", "budget", f"{name} ms"],
            long(found),
        )


def add_batches(page: Page, rows: Sequence[Row]) -> None:
    """Latency against the batch size (promoe figure 14)."""
    if len({row["batch"] for row in rows}) < 2:
        return
    for budget in dict.fromkeys(row["budget"] for row in rows):
        of_budget = [row for row in rows if row["budget"] == budget]
        found = series(of_budget, "batch", "tpot_seconds", 1000)
        page.figure(
            f"tpot-batch-{slug(budget)}",
            f"TPOT against the batch size, budget {budget}",
            lines_of(found, "prompts together", "TPOT, ms"),
            ["system", "batch", "TPOT ms"],
            long(found),
        )


def add_cdf(page: Page, rows: Sequence[Row], batch: int, budget: str) -> None:
    """How the decode steps' times are distributed (fmoe figure 10)."""
    shares = list(range(0, 101, 2))
    found: dict[str, list[float]] = {
        label(row): [1000 * float(t) for t in np.percentile(row["steps"], shares)]
        for row in rows
        if row.get("steps")
    }
    emphasised = [name for name in EMPHASISED if name in found]

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        others = [name for name in found if name not in emphasised]
        for i, name in enumerate(others):
            axes.plot(
                found[name], shares, color=f"C{(i + 4) % 8}", alpha=0.45, linewidth=1, label=name
            )
        for i, name in enumerate(emphasised):
            axes.plot(
                found[name],
                shares,
                "--" if "simulated" in name else "-",
                color=f"C{i}",
                label=name,
            )
        axes.set_xlabel("decode step, ms")
        axes.set_ylabel("% of steps")
        axes.set_xlim(left=0)
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))

    page.figure(
        f"cdf-{slug(budget)}-batch-{batch}",
        f"Decode steps' times, budget {budget}, batch {batch}",
        draw,
        ["system", "share of steps", "ms"],
        [
            [name, share, time]
            for name, times in found.items()
            for share, time in zip(shares, times, strict=True)
        ],
    )


def add_ablation(page: Page, rows: Sequence[Row], batch: int) -> None:
    """ProMoE without each of its techniques (ProMoE, figure 12)."""
    names = [ON_DEMAND, PROMOE, *ABLATIONS]
    kept = [row for row in rows if row["system"] in names]
    if not any(row["system"] in ABLATIONS for row in kept):
        return
    found = series(kept, "budget", "tpot_seconds", 1000)
    budgets = list(dict.fromkeys(row["budget"] for row in kept))

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        width = 0.8 / len(found)
        for i, (name, (places, values)) in enumerate(found.items()):
            x = [budgets.index(place) + width * (i - (len(found) - 1) / 2) for place in places]
            axes.bar(x, values, width * 0.9, color=f"C{i}", label=name)
        axes.set_xticks(range(len(budgets)), budgets)
        axes.set_xlabel("memory for experts")
        axes.set_ylabel("TPOT, ms")
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))

    page.figure(
        f"ablation-batch-{batch}",
        f"promoe without each of its techniques, batch {batch}",
        draw,
        ["system", "budget", "TPOT ms"],
        long(found),
    )


def slug(budget: str) -> str:
    """A budget in a file's name."""
    return budget.replace("%", "pct").replace(".", "_")
