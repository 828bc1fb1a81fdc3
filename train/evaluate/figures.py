"""Figures of the comparison: each function adds one to a page, as the papers draw them."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from runtime.tools.comparison import Condition
from runtime.tools.report.figures import hue_color, muted_color
from runtime.tools.report.html_report import HtmlReport
from runtime.tools.report.line_labels import draw_legend, draw_lines, label_lines
from runtime.tools.report.series_styles import line_style
from runtime.tools.report.spreads import (
    MEDIAN,
    PERCENTILES,
    SPREADS_NOTE,
    draw_spreads,
    spreads_height,
)
from runtime.tools.report.tables import Row
from train.evaluate.jobs import ReplayRow
from train.evaluate.timeline import TimelineSpan
from train.evaluate.variants import NO_PREFETCH, TABLE, TRUTH

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANEL_INCHES = 4.6
BOUND = "bound"
"""Label of the line that no system can cross."""

SPAN_HUES = {"compute": "navy", "stall": "maroon", "fetch": "orange", "prefetch": "teal"}
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
) -> None:
    """Draw a panel for each machine side by side, with each line's name at its end."""
    grid = figure.subplots(1, len(names), squeeze=False)
    for axes, machine in zip(grid[0], names, strict=True):
        draw_panel(axes, machine)
        axes.set(title=machine, xlabel=xlabel)
    grid[0][0].set_ylabel(ylabel)


def draw_systems(
    axes: "Axes", rows: Sequence[Row], key: str, across: str, ticks: Mapping[Any, float]
) -> None:
    """Draw a line of the figure `key` for each system, and the bound, on a logarithmic axis.

    What lies beyond the bound's line, which nothing can reach, is shaded.
    """
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    for system, own in by_system(rows).items():
        draw_lines(axes, {system: ([ticks[row[across]] for row in own], [row[key] for row in own])})
    limits = {ticks[row[across]]: read_bound(row, key) for row in rows}
    draw_lines(axes, {BOUND: (list(limits), list(limits.values()))})
    axes.set_yscale("log")
    # 12 rather than 1.2 x 10^1.
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xticks(list(ticks.values()), list(map(str, ticks)))
    axes.margins(x=0.02)
    shade_beyond(axes, below=key.endswith("_ms"))
    label_lines(axes)


def read_bound(row: Row, key: str) -> float | None:
    """Return the bound of a figure of this row's condition."""
    if key == "ttft_mean_ms":
        return row["bound_ttft_ms"]
    if key == "tokens_per_second":
        if row["bound_tpot_ms"] is None:
            return None
        return 1e3 * row["new_tokens"] / row["decode_steps"] / row["bound_tpot_ms"]
    assert key == "tpot_mean_ms", key
    return row["bound_tpot_ms"]


def shade_beyond(axes: "Axes", *, below: bool) -> None:
    """Shade what lies below the bound's line, or above it, to the edge of the axes."""
    (line,) = (line for line in axes.get_lines() if line.get_label() == BOUND)
    y = np.array(line.get_ydata(), dtype=float)
    lowest, highest = axes.get_ylim()
    edge = lowest if below else highest
    axes.fill_between(line.get_xdata(), y, edge, color=muted_color(), alpha=0.13, linewidth=0)
    axes.set_ylim(lowest, highest)


LATENCIES = {
    "TPOT": ("tpot_mean_ms", "of a generated token"),
    "TTFT": ("ttft_mean_ms", "of a prefill"),
}


def draw_budgets(page: HtmlReport, results: Row, batch: int) -> None:
    """Draw TPOT and TTFT against the budget (ProMoE, figure 10)."""
    rows = [row for row in results["rows"] if row["batch"] == batch]
    names = machines(rows)
    for latency, (key, described) in LATENCIES.items():

        def draw(figure: "Figure", key: str = key, latency: str = latency) -> None:
            def draw_panel(axes: "Axes", machine: str) -> None:
                here = [row for row in rows if row["hardware"] == machine]
                ticks = place_budgets(list(dict.fromkeys(row["budget"] for row in here)))
                draw_systems(axes, here, key, "budget", ticks)

            xlabel, ylabel = "memory for experts, share of all", f"{latency}, ms (log scale)"
            draw_machines(figure, names, draw_panel, xlabel=xlabel, ylabel=ylabel)

        interval, bound = f"{latency.lower()}_interval_ms", f"bound_{latency.lower()}_ms"
        columns = ("hardware", "budget", "system", key, "from_ms", "to_ms", bound)
        values = [
            (*start, *(row[interval] or (None, None)), row[bound])
            for start, row in zip(pick(rows, columns[:4]), rows, strict=True)
        ]
        page.figure(
            f"{latency.lower()}-against-budget",
            f"{latency} against the memory budget",
            draw,
            columns,
            values,
            note=f"Mean time {described}, batch {batch}; as in ProMoE, figure 10. Lower is better; "
            "the shaded area below the bound is out of reach.",
            inches=(wide(len(names)), 4.8),
        )


def place_budgets(budgets: Sequence[str]) -> dict[str, float]:
    """Return the place of each budget on the axis: shares to scale, sizes at equal distances."""
    if all(budget.endswith("%") for budget in budgets):
        return {budget: float(budget[:-1]) for budget in budgets}
    return {budget: float(place) for place, budget in enumerate(budgets)}


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
                for key in ("tpot_mean_ms", "ttft_mean_ms")
            )
            times = row["tpot_mean_ms"], row["ttft_mean_ms"]
            values.append((machine, stage, *times, decode, prefill))

    def draw(figure: "Figure") -> None:
        panels = figure.subplots(1, 2, sharey=True)
        height = 0.8 / len(names)
        for axes, column, title in zip(panels, (5, 4), ("Prefill", "Decode"), strict=True):
            for place, machine in enumerate(names):
                widths = [row[column] or 0.0 for row in values if row[0] == machine]
                below = [i + (place - (len(names) - 1) / 2) * height for i in range(len(stages))]
                hue = hue_color(("red", "salmon", "maroon", "orange")[place % 4])
                bars = axes.barh(below, widths, height * 0.88, label=machine, color=hue)
                axes.bar_label(bars, fmt="%.2fx", fontsize=8.5, padding=3)
            axes.axvline(1.0, linewidth=1.0, color=muted_color(), linestyle=":")
            axes.set(title=title, xlabel="times faster than base", xlim=(0, None))
            axes.set_yticks(range(len(stages)), stages)
            axes.margins(x=0.14)
            axes.grid(visible=False, axis="y")
        panels[0].invert_yaxis()
        draw_legend(figure, panels[0])

    times_ms = ("tpot_mean_ms", "ttft_mean_ms")
    columns = ("hardware", "stage", *times_ms, "speedup_decode", "speedup_prefill")
    place = f"budget {rows[0]['budget']}, batch {rows[0]['batch']}"
    page.figure(
        f"ablation-of-{subject}",
        f"Speed-up as the techniques of {subject} are added",
        draw,
        columns,
        values,
        note=f"Means, {place}. Base: LRU without prefetching; then each technique is added to "
        "those before it, as in ProMoE, figure 12.",
        inches=(9.5, 4.4),
    )


def draw_known(page: HtmlReport, results: Row) -> None:
    """Draw the share of the bound against the number of tokens whose routing is known."""
    rows, ours = results["known"], results["ours"]
    names, budgets = machines(rows), list(dict.fromkeys(row["budget"] for row in rows))
    labels = [ours, *dict.fromkeys(row["system"] for row in rows)]
    batch = rows[0]["batch"]
    own = [row for row in results["rows"] if row["system"] == ours and row["batch"] == batch]
    points = [*own, *rows]

    def draw(figure: "Figure") -> None:
        def draw_panel(axes: "Axes", machine: str) -> None:
            for place, budget in enumerate(budgets):
                shares = {
                    row["system"]: 100 * row["of_bound"]
                    for row in points
                    if (row["hardware"], row["budget"]) == (machine, budget)
                }
                hue = hue_color(("red", "orange", "teal", "navy")[place % 4])
                known = [labels.index(label) for label in shares]
                axes.plot(known, list(shares.values()), label=budget, color=hue, marker="o")
            axes.set_xticks(range(len(labels)), labels)
            axes.set_ylim(top=100)
            label_lines(axes)

        xlabel, ylabel = "tokens whose routing is known", "share of the bound, %"
        draw_machines(figure, names, draw_panel, xlabel=xlabel, ylabel=ylabel)

    columns = ("hardware", "budget", "system", "of_bound", "tpot_mean_ms", "bound_tpot_ms")
    page.figure(
        "share-of-the-bound-against-known-tokens",
        "Share of the bound against the tokens whose routing is known",
        draw,
        columns,
        pick(points, columns),
        note=f"Batch {batch}, a line for each budget. {ours}: forecasts only. 1: the token that is "
        "computed; all: the whole trace, which shows how tight the bound is.",
        inches=(wide(len(names)), 4.2),
    )


def draw_batches(page: HtmlReport, results: Row, budget: str) -> None:
    """Draw throughput against the number of requests that decode together (Klotski, figure 10)."""
    rows = [row for row in results["rows"] if row["budget"] == budget]
    names = machines(rows)
    columns = ("hardware", "batch", "system", "tokens_per_second", "tpot_mean_ms", "bound_tpot_ms")

    def draw(figure: "Figure") -> None:
        def draw_panel(axes: "Axes", machine: str) -> None:
            here = [row for row in rows if row["hardware"] == machine]
            ticks = {batch: place for place, batch in enumerate(sorted({r["batch"] for r in here}))}
            draw_systems(axes, here, "tokens_per_second", "batch", ticks)

        xlabel, ylabel = "requests that decode together", "tokens/s (log scale)"
        draw_machines(figure, names, draw_panel, xlabel=xlabel, ylabel=ylabel)

    page.figure(
        "throughput-against-batch-size",
        "Throughput against the batch size",
        draw,
        columns,
        pick(rows, columns),
        note=f"Budget {budget}. Higher is better; the shaded area above the bound is out of reach.",
        inches=(wide(len(names)), 5.0),
    )


def draw_distances(page: HtmlReport, results: Row, subject: str) -> None:
    """Draw TPOT of one system with forecasts of one distance alone (ProMoE, figure 14)."""
    rows = results["distance"]
    names = machines(rows)
    columns = ("hardware", "system", "distance", "tpot_mean_ms", "hit_rate", "stall_share")

    def draw(figure: "Figure") -> None:
        def draw_panel(axes: "Axes", machine: str) -> None:
            lines = by_system([row for row in rows if row["hardware"] == machine])
            (without,) = lines.pop(NO_PREFETCH)
            ahead = sorted({row["distance"] for own in lines.values() for row in own})
            axes.plot(
                [ahead[0], ahead[-1]],
                2 * [without["tpot_mean_ms"]],
                label=NO_PREFETCH,
                **{**line_style("on-demand"), "marker": ""},
            )
            for label, own in lines.items():
                # Both know the routing of this step.
                style = line_style("oracle" if label == TRUTH else label.partition(",")[0])
                axes.plot(
                    [row["distance"] for row in own],
                    [row["tpot_mean_ms"] for row in own],
                    label="the routing itself" if label == TRUTH else label,
                    **style,
                )
            axes.set_xticks(ahead)
            label_lines(axes)

        draw_machines(figure, names, draw_panel, xlabel="layers ahead", ylabel="mean TPOT, ms")

    place = f"budget {rows[0]['budget']}, batch {rows[0]['batch']}"
    page.figure(
        "tpot-against-prefetch-distance",
        f"TPOT of {subject} with forecasts of one distance alone",
        draw,
        columns,
        pick(rows, columns),
        note=f"{place.capitalize()}. `mlp, stride`: the paper's "
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
    rows.sort(key=lambda row: row.tpot_percentiles_ms[MEDIAN])
    names = machines(results["rows"])
    values = [
        (row.hardware, row.system, percent, value)
        for row in rows
        for percent, value in enumerate(row.tpot_percentiles_ms)
    ]

    def draw(figure: "Figure") -> None:
        grid = figure.subplots(1, len(names), squeeze=False)
        systems = list(dict.fromkeys(row.system for row in rows))
        for axes, machine in zip(grid[0], names, strict=True):
            spreads = {
                row.system: [row.tpot_percentiles_ms[percent] for percent in PERCENTILES]
                for row in rows
                if row.hardware == machine
            }
            draw_spreads(axes, spreads, order=systems)
            axes.set(title=machine, xlabel="time of a token, ms")
        for axes in grid[0][1:]:
            axes.set_yticklabels([])

    page.figure(
        "tpot-distribution",
        "Distribution of the time of a token",
        draw,
        ("hardware", "system", "percent", "tpot_ms"),
        values,
        note=f"{str(condition).capitalize()}. {SPREADS_NOTE}",
        inches=(wide(len(names)), spreads_height(len({row.system for row in rows}))),
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
            for kind, hue in SPAN_HUES.items():
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
                        facecolor=hue_color(hue),
                        edgecolor=figure.get_facecolor(),
                        linewidth=0.6,
                        label=None if kind in seen else SPAN_LABELS[kind],
                    )
                    seen.add(kind)
        axes.set_yticks([place + 0.47 for place in range(len(systems))], systems)
        axes.set_ylim(len(systems), -0.1)
        axes.set_xlim(left=0)
        axes.set_xlabel("ms since the first of these layers began")
        axes.grid(visible=False, axis="y")
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4)

    columns = ("system", "kind", "start_ms", "end_ms", "layer", "expert")
    page.figure(
        "timeline-of-layers",
        "Timeline of a few layers of one token",
        draw,
        columns,
        [
            (span.system, span.kind, span.start_ms, span.end_ms, span.layer, span.expert)
            for span in spans
        ],
        note=f"{hardware}, {condition}: the same layers of the same token. Above, "
        "the computation and its stalls; below, the link.",
        inches=(9.5, 1.0 + 0.8 * max(1, len(systems))),
    )
