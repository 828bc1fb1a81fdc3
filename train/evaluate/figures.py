"""Figures of the comparison: each function adds one to a page, as the papers draw them."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from runtime.tools.comparison import Condition
from runtime.tools.report.html_report import HtmlReport
from runtime.tools.report.line_styles import system_styles
from runtime.tools.report.tables import Row
from train.evaluate.jobs import ReplayRow
from train.evaluate.timeline import TimelineSpan
from train.evaluate.variants import NO_PREFETCH, TABLE, TRUTH

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANEL_INCHES = 4.0

SPAN_COLOURS = {"compute": "C0", "stall": "C1", "fetch": "C3", "prefetch": "C2"}
SPAN_LABELS = {
    "compute": "compute",
    "stall": "stall",
    "fetch": "fetch, requested by a router",
    "prefetch": "fetch, requested by a forecast",
}
"""Descriptions of a timeline's spans."""


def by_system(rows: Sequence[Row]) -> dict[str, list[Row]]:
    systems: dict[str, list[Row]] = {}
    for row in rows:
        systems.setdefault(row["system"], []).append(row)
    return systems


def machines(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["hardware"] for row in rows))


def pick(rows: Sequence[Row], keys: Sequence[str]) -> list[tuple[Any, ...]]:
    return [tuple(row[key] for key in keys) for row in rows]


def legend(figure: "Figure", axes: "Axes", columns: int = 4) -> None:
    """Add one legend for all panels, below them."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)


def wide(panels: int) -> float:
    """Return the width in inches of a figure with this many panels side by side."""
    return max(8.0, PANEL_INCHES * panels)


def draw_machines(
    figure: "Figure",
    names: Sequence[str],
    draw_panel: Callable[["Axes", str], None],
    *,
    xlabel: str,
    ylabel: str,
    legend_columns: int = 4,
) -> None:
    """Draw a panel for each machine side by side, and one legend below them."""
    grid = figure.subplots(1, len(names), squeeze=False)
    for axes, machine in zip(grid[0], names, strict=True):
        draw_panel(axes, machine)
        axes.set(title=machine, xlabel=xlabel)
    grid[0][0].set_ylabel(ylabel)
    legend(figure, grid[0][0], legend_columns)


def draw_systems(
    axes: "Axes",
    rows: Sequence[Row],
    key: str,
    across: str,
    ticks: Mapping[Any, float],
    styles: Any,
) -> None:
    """Draw a line of the figure `key` for each system on a logarithmic axis."""
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    for system, own in by_system(rows).items():
        places = [ticks[row[across]] for row in own]
        axes.plot(places, [row[key] for row in own], label=system, **styles[system])
    axes.set_yscale("log")
    # 12 rather than 1.2 x 10^1.
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xticks(list(ticks.values()), list(map(str, ticks)))


def draw_budgets(page: HtmlReport, results: Row, batch: int) -> None:
    """Draw latency against the budget, decode above and prefill below (ProMoE, figure 10)."""
    rows = [row for row in results["rows"] if row["batch"] == batch]
    names = machines(rows)
    columns = ("hardware", "budget", "system", "tpot_ms", "ttft_ms")

    def draw(figure: "Figure") -> None:
        grid = figure.subplots(2, len(names), squeeze=False, sharex=True)
        styles = styles_of(results)
        for place, machine in enumerate(names):
            here = [row for row in rows if row["hardware"] == machine]
            ticks = axis_of(list(dict.fromkeys(row["budget"] for row in here)))
            draw_systems(grid[0][place], here, "tpot_ms", "budget", ticks, styles)
            draw_systems(grid[1][place], here, "ttft_ms", "budget", ticks, styles)
            grid[0][place].set_title(f"{machine}: decode")
            grid[1][place].set(title=f"{machine}: prefill", xlabel="memory for experts")
        grid[0][0].set_ylabel("TPOT, ms")
        grid[1][0].set_ylabel("TTFT, ms")
        legend(figure, grid[0][0])

    page.figure(
        "latency-against-cache-rate",
        "Latency against cache rate",
        draw,
        columns,
        pick(rows, columns),
        note=f"Medians, batch {batch}; as in ProMoE, figure 10. The vertical axes are logarithmic.",
        inches=(wide(len(names)), 7.6),
    )


def axis_of(budgets: Sequence[str]) -> dict[str, float]:
    """Return the place of each budget on the axis: shares to scale, sizes at equal distances."""
    if all(budget.endswith("%") for budget in budgets):
        return {budget: float(budget[:-1]) for budget in budgets}
    return {budget: float(place) for place, budget in enumerate(budgets)}


def styles_of(results: Row) -> Mapping[str, Any]:
    return system_styles(
        list(dict.fromkeys(row["system"] for row in results["rows"])),
        ours=results["ours"],
        subject=results["ablated"],
        baseline=results["baseline"],
        bound=results["bound"],
    )


def draw_ablation(page: HtmlReport, results: Row, subject: str) -> None:
    """Draw the speed-ups of techniques added one after another (ProMoE, figure 12)."""
    rows = results["ablation"]
    names = machines(rows)
    stages = list(dict.fromkeys(row["system"] for row in rows))
    values = []
    for machine in names:
        here = {row["system"]: row for row in rows if row["hardware"] == machine}
        base = here[stages[0]]
        for stage in stages:
            row = here[stage]
            decode, prefill = (
                base[key] / row[key] if row[key] and base[key] else None
                for key in ("tpot_ms", "ttft_ms")
            )
            values.append((machine, stage, row["tpot_ms"], row["ttft_ms"], decode, prefill))

    def draw(figure: "Figure") -> None:
        grid = figure.subplots(1, 2, squeeze=False, sharey=True)
        width = 0.8 / len(names)
        for axes, column, title in ((grid[0][0], 5, "prefill"), (grid[0][1], 4, "decode")):
            for place, machine in enumerate(names):
                heights = [one[column] or 0.0 for one in values if one[0] == machine]
                left = [i + (place - (len(names) - 1) / 2) * width for i in range(len(stages))]
                bars = axes.bar(left, heights, width * 0.92, label=machine, color=f"C{place}")
                axes.bar_label(bars, fmt="%.2f", fontsize=8, padding=2)
            axes.axhline(1.0, linewidth=1.0, color="C7", linestyle=":")
            axes.set_title(title)
            axes.set_xticks(range(len(stages)), [broken(one) for one in stages], fontsize=8.5)
            axes.grid(visible=False, axis="x")
        grid[0][0].set_ylabel("speed-up over base")
        legend(figure, grid[0][0])

    columns = ("hardware", "stage", "tpot_ms", "ttft_ms", "speedup_decode", "speedup_prefill")
    place = f"budget {rows[0]['budget']}, batch {rows[0]['batch']}"
    page.figure(
        "ablation",
        f"Ablation of {subject}",
        draw,
        columns,
        values,
        note=f"{place}. Base: LRU without prefetching; then each technique is added to those "
        "before it, as in ProMoE, figure 12.",
        inches=(9.5, 4.4),
    )


def broken(stage: str) -> str:
    """Break `+ early preemption` into two lines, which are as wide as a bar."""
    first, _, last = stage.rpartition(" ")
    return f"{first}\n{last}" if " " in first else stage


def draw_batches(page: HtmlReport, results: Row, budget: str) -> None:
    """Draw throughput against the number of requests that decode together (Klotski, figure 10)."""
    rows = [row for row in results["rows"] if row["budget"] == budget]
    names = machines(rows)
    columns = ("hardware", "batch", "system", "tokens_per_second", "tpot_ms")

    def draw(figure: "Figure") -> None:
        styles = styles_of(results)

        def draw_panel(axes: "Axes", machine: str) -> None:
            here = [row for row in rows if row["hardware"] == machine]
            ticks = {batch: place for place, batch in enumerate(sorted({r["batch"] for r in here}))}
            draw_systems(axes, here, "tokens_per_second", "batch", ticks, styles)

        xlabel, ylabel = "requests that decode together", "throughput, tokens/s"
        draw_machines(figure, names, draw_panel, xlabel=xlabel, ylabel=ylabel)

    page.figure(
        "batch-size",
        "Batch size",
        draw,
        columns,
        pick(rows, columns),
        note=f"Budget {budget}; the vertical axes are logarithmic.",
        inches=(wide(len(names)), 5.0),
    )


def draw_distances(page: HtmlReport, results: Row, subject: str) -> None:
    """Draw TPOT of one system with forecasts of one distance alone (ProMoE, figure 14)."""
    rows = results["distance"]
    names = machines(rows)
    columns = ("hardware", "system", "distance", "tpot_ms", "hit_rate", "stall_share")

    def draw(figure: "Figure") -> None:
        from runtime.tools.report.figures import muted_color, text_color

        def draw_panel(axes: "Axes", machine: str) -> None:
            lines = by_system([row for row in rows if row["hardware"] == machine])
            (without,) = lines.pop(NO_PREFETCH)
            for place, (label, own) in enumerate(lines.items()):
                axes.plot(
                    [row["distance"] for row in own],
                    [row["tpot_ms"] for row in own],
                    label="the routing itself" if label == TRUTH else label,
                    color=text_color() if label == TRUTH else f"C{place - 1}",
                    linestyle=":" if label == TRUTH else "-",
                    marker=".os^D"[place % 5],
                )
            axes.axhline(without["tpot_ms"], color=muted_color(), linewidth=1.2, label=NO_PREFETCH)
            axes.set_ylim(bottom=0)
            axes.locator_params(axis="x", integer=True)

        draw_machines(
            figure, names, draw_panel, xlabel="layers ahead", ylabel="TPOT, ms", legend_columns=5
        )

    place = f"budget {rows[0]['budget']}, batch {rows[0]['batch']}"
    page.figure(
        "prefetch-distance",
        "Prefetch distance",
        draw,
        columns,
        pick(rows, columns),
        note=f"{subject} with forecasts of one distance alone; {place}. `mlp, stride`: the paper's "
        "networks, one and two layers ahead. The routing itself: what a perfect forecast of that "
        "distance gives.",
        inches=(wide(len(names)), 4.2),
    )


def draw_distribution(
    page: HtmlReport, results: Row, replays: Sequence[ReplayRow], condition: Condition
) -> None:
    """Draw the distribution of the time of a decode step on each machine (fMoE, figure 10)."""
    rows = [
        row
        for row in replays
        if row.part == TABLE
        and Condition(row.budget, row.batch) == condition
        and row.tpot_percentiles_ms
    ]
    names = list(dict.fromkeys(row.hardware for row in rows))
    values = [
        (row.hardware, row.system, percent, value)
        for row in rows
        for percent, value in enumerate(row.tpot_percentiles_ms)
    ]

    def draw(figure: "Figure") -> None:
        styles = styles_of(results)

        def draw_panel(axes: "Axes", machine: str) -> None:
            for row in rows:
                if row.hardware == machine:
                    points = row.tpot_percentiles_ms
                    settings = {**styles[row.system], "marker": None}
                    axes.plot(points, range(len(points)), label=row.system, **settings)
            axes.set_xlim(left=0)

        xlabel, ylabel = "time of a token, ms", "percent of tokens"
        draw_machines(figure, names, draw_panel, xlabel=xlabel, ylabel=ylabel)

    page.figure(
        "latency-cdf",
        "Distribution of latency",
        draw,
        ("hardware", "system", "percent", "tpot_ms"),
        values,
        note=f"{str(condition).capitalize()}: share of decode steps that take no longer.",
        inches=(wide(len(names)), 5.0),
    )


def draw_timeline(
    page: HtmlReport, spans: Sequence[TimelineSpan], *, hardware: str, condition: Condition
) -> None:
    """Draw the same layers of the same token, system below system, on one axis of time."""
    systems = list(dict.fromkeys(span.system for span in spans))

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        seen: set[str] = set()
        for place, system in enumerate(systems):
            for kind, colour in SPAN_COLOURS.items():
                lane = 0.0 if kind in ("compute", "stall") else 0.42
                bars = [
                    (span.start_ms, span.end_ms - span.start_ms)
                    for span in spans
                    if (span.system, span.kind) == (system, kind)
                ]
                if bars:
                    axes.broken_barh(
                        bars,
                        (place + lane + 0.08, 0.36),
                        facecolor=colour,
                        edgecolor=figure.get_facecolor(),
                        linewidth=0.6,
                        label=None if kind in seen else SPAN_LABELS[kind],
                    )
                    seen.add(kind)
        axes.set_yticks([place + 0.47 for place in range(len(systems))], systems)
        axes.set_ylim(len(systems), -0.1)
        axes.set_xlim(left=0)
        axes.set_xlabel("ms")
        axes.grid(visible=False, axis="y")
        legend(figure, axes)

    columns = ("system", "kind", "start_ms", "end_ms", "layer", "expert")
    page.figure(
        "timeline",
        "Timeline of a few layers",
        draw,
        columns,
        [(one.system, one.kind, one.start_ms, one.end_ms, one.layer, one.expert) for one in spans],
        note=f"{hardware}, {condition}: the same layers of the same token. Above, "
        "the computation and its stalls; below, the link.",
        inches=(9.5, 1.0 + 0.8 * max(1, len(systems))),
    )
