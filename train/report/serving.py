"""Figures and tables of the value and cost of forecasts: caches, trace size, drift, latency."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from predictors.registry import REUSE_PREDICTORS
from runtime.tools.report.figures import muted_color
from runtime.tools.report.html_report import HtmlReport
from runtime.tools.report.line_labels import draw_legend, label_lines
from runtime.tools.report.series_styles import DASHED, SOLID, line_style, series_style
from runtime.tools.report.table_cells import Cell
from train.drift import MARKS
from train.report.forecasts import AGAIN, Table
from train.report.measured import HitRateRow

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BASELINE, BOUND = "lru", "belady"


def hit_rate(page: HtmlReport, rows: Sequence[HitRateRow], *, num_tokens: int) -> None:
    """Draw the hit rate of every eviction policy at every cache size, between LRU and the bound."""
    heading = "Hit rate of each eviction policy, by cache size"
    if any(row.hit_rate is None for row in rows):
        page.text(heading, ["The trace has no generated tokens."])
        return
    sizes = sorted({row.cache_percent for row in rows})
    rates = by_policy(rows, "hit_rate")
    note = (
        "Share of the experts that generated tokens need which are in the arena when their router "
        f"asks; nothing is prefetched, the arena is divided by layers, {num_tokens:,} generated "
        "held-out tokens. The line is `lru`; `belady` knows the future: the bound."
    )
    if not REUSE_PREDICTORS.keys() & rates.keys():
        note += " `reuse` asks a trained forecaster: `moecast train predictor=all` trains it."
    columns = ("cache_percent", "eviction", "hit_rate", "gap_closed")
    page.figure(
        "hit-rate-by-eviction-policy",
        heading,
        lambda figure: draw_hit_rates(figure, sizes, rates),
        columns,
        [[getattr(row, key) for key in columns] for row in rows],
        note=note,
        inches=(9.2, 1.3 + 0.29 * len(rates)),
    )


def draw_hit_rates(
    figure: "Figure", sizes: Sequence[int], rates: Mapping[str, Sequence[float | None]]
) -> None:
    """Draw a panel for each cache size with a row for each policy, the best on top.

    Args:
        sizes: cache sizes in percent of all experts.
        rates: hit rates of each policy at these sizes.
    """
    names = sorted(rates, key=lambda name: -sum(rate or 0.0 for rate in rates[name]))
    panels = figure.subplots(1, len(sizes), sharey=True, squeeze=False)[0]
    for column, (axes, size) in enumerate(zip(panels, sizes, strict=True)):
        zero = 100 * (rates[BASELINE][column] or 0.0)
        axes.axvline(zero, color=muted_color(), linewidth=1.2)
        best = max(100 * (rates[name][column] or 0.0) for name in names)
        for row, name in enumerate(names):
            rate, style = 100 * (rates[name][column] or 0.0), series_style(name)
            axes.plot([zero, rate], [row, row], color=style.color, linewidth=1.4, alpha=0.7)
            axes.plot([rate], [row], color=style.color, marker=style.marker, markersize=7)
            axes.annotate(
                f"{rate:.1f}", (max(rate, zero), row), (7, 0), textcoords="offset points",
                va="center", fontsize=8.5, color=muted_color(),
            )  # fmt: skip
        width = max(best - zero, 1.0)
        lowest = min(100 * (rates[name][column] or 0.0) for name in names)
        axes.set(
            title=f"cache of {size} %",
            xlabel="hit rate, %",
            xlim=(min(lowest, zero) - 0.1 * width, best + 0.42 * width),
        )
        axes.locator_params(axis="x", nbins=4)
        axes.grid(visible=False, axis="y")
    shown = [f"{name}: the bound" if name == BOUND else name for name in names]
    panels[0].set_yticks(range(len(names)), shown)
    panels[0].set_ylim(len(names) - 0.4, -0.6)
    for label, name in zip(panels[0].get_yticklabels(), names, strict=True):
        label.set_weight("bold" if series_style(name).width > 2.5 else "normal")


def by_policy(rows: Sequence[HitRateRow], key: str) -> dict[str, list[float | None]]:
    """Return the values of each policy in the order of the cache's size."""
    policies: dict[str, list[float | None]] = {}
    for row in sorted(rows, key=lambda row: row.cache_percent):
        policies.setdefault(row.eviction, []).append(getattr(row, key))
    return policies


def keeping(page: HtmlReport, results: Mapping[str, Any] | None) -> None:
    """Hit rates of learned eviction among the other policies, on the longer replay."""
    if not results:
        return
    policies: list[str] = []
    learned: list[str] = []
    rows: list[list[Cell]] = []
    for stream, budgets in results["hit_rates"].items():
        for phase in ("decode", "prefill"):
            for budget, one in budgets.items():
                policies = list(one)
                learned = [policy for policy in policies if policy in REUSE_PREDICTORS]
                rates = [one[policy][phase] for policy in policies]
                if rates[0] is not None:
                    gaps = [one[policy][f"{phase}_gap_closed"] for policy in learned]
                    rows.append([stream, phase, budget, *rates, *gaps])
    page.table(
        "What learned eviction keeps",
        [
            *("requests, arena", "phase", "cache", *policies),
            *(f"gap closed by {policy}" for policy in learned),
        ],
        rows,
        note=f"{results['definition']}.",
        name="reuse",
    )


def trace_size(page: HtmlReport, rows: Sequence[Mapping[str, Any]], *, others: str | None) -> None:
    """Accuracy against training tokens.

    For a predictor and distance the best of the widths and passes that were tried.
    """
    best: dict[tuple[str, int], Mapping[str, Any]] = {}
    for row in rows:
        key = (_label(row), row["train_tokens"])
        if row["train_tokens"] and (
            key not in best or row["mean_accuracy"] > best[key]["mean_accuracy"]
        ):
            best[key] = row
    if not best:
        page.text("Accuracy against the size of the training trace", ["Not measured.", HOW])
        return
    names = list(dict.fromkeys(name for name, _ in best))
    points = {
        name: sorted(
            ((tokens, row) for (label, tokens), row in best.items() if label == name),
            key=lambda point: point[0],
        )
        for name in names
    }

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        for name, rows in points.items():
            axes.plot(
                [tokens for tokens, _ in rows],
                [row["mean_accuracy"] for _, row in rows],
                label=name,
                **line_style(name),
            )
        axes.set_xscale("log", base=2)
        ticks = sorted({tokens for _, tokens in best})
        axes.set_xticks(ticks, [thousands(tokens) for tokens in ticks])
        axes.minorticks_off()
        axes.set(xlabel="training tokens", ylabel="mean accuracy, held out")
        axes.set_xmargin(0.02)
        label_lines(axes)

    columns = ("predictor", "horizon", "train_tokens", "prompts", "width", "passes",
               "mean_accuracy", "worst_layer_accuracy")  # fmt: skip
    page.figure(
        "accuracy-by-trace-size",
        "Accuracy against the size of the training trace",
        draw,
        columns,
        [[row.get(key) for key in columns] for row in rows],
        note="Nested parts of the training requests, the same held-out tokens. "
        + (f"Learned predictors: {others}; the best of the sizes and passes." if others else HOW),
        inches=(8, 4.2),
    )


HOW = (
    "Learned predictors take longer: `python -m benchmarks ceiling trace=TRACE output=FILE` "
    "measures them, and `moecast train report run_dir=RUN ceiling=FILE` draws them here."
)


def _label(row: Mapping[str, Any]) -> str:
    return row["predictor"] + (f", {row['horizon']} ahead" if row["horizon"] is not None else "")


def thousands(number: int) -> str:
    return f"{number / 1000:.0f}k" if number >= 1000 else f"{number}"


def latency_table(page: HtmlReport, table: Table, num_layers: int) -> None:
    batches = sorted({int(batch) for row in table.values() for batch in row["latency_us"]})
    columns = ["predictor", "size, KiB"]
    columns += [f"{what}, batch {batch}, us" for batch in batches for what in ("p50", "p99")]
    columns.append("a whole step, batch 1, us")
    rows: list[list[Cell]] = []
    for name, one in table.items():
        cells: list[Cell] = [name, one["bytes"] / 1024]
        for batch in batches:
            timed = one["latency_us"][str(batch)]
            cells += [None, None] if timed is None else [timed["layer_p50"], timed["layer_p99"]]
        alone = one["latency_us"][str(batches[0])]
        whole = None if alone is None else num_layers * alone["layer_p50"]
        cells.append(None if alone is None else whole + alone["begin_and_end_p50"])
        rows.append(cells)
    page.table(
        "Latency and size",
        columns,
        rows,
        note="Median and 99th percentile of the time that the events of one layer take, on the "
        "machine that trained; a whole step: all layers' medians, and its beginning and end, where "
        "a predictor that needs no state of the model does its work.",
        name="latency-and-size",
    )


def shifted_table(page: HtmlReport, table: Table) -> None:
    """Accuracy on prompts of another distribution."""
    known = {name: row["shifted"] for name, row in table.items() if row["shifted"]}
    if not known:
        reason = f"Not scored (`score_shifted=false`): {AGAIN}."
        page.text("Prompts of another distribution", [reason])
        return
    first = next(iter(known.values()))
    rows: list[list[Cell]] = []
    for name, one in known.items():
        at_home = table[name]["mean_accuracy"]
        rows.append(
            [name, at_home, one["mean_accuracy"], one["mean_accuracy"] - at_home,
             one["worst_layer_accuracy"]]
        )  # fmt: skip
    page.table(
        "Prompts of another distribution",
        ["predictor", "held out", "shifted", "difference", "shifted, worst layer"],
        rows,
        note=f"Accuracy on {first['tokens']:,} tokens of `{first['dataset']}`, none of which was "
        "trained on. Predictors that learn while they serve learn from these requests.",
        name="shifted",
    )


def drift(page: HtmlReport, results: Mapping[str, Any] | None) -> None:
    """Cold start, and another distribution with and without learning."""
    if not results:
        page.text(
            "Learning while serving",
            ["Not measured: `moecast train drift=true` with the same options measures it, for "
             "the predictors that learn while they serve."],
        )  # fmt: skip
        return
    rows: list[list[Any]] = []
    for name, one in results.items():
        curves = {"from nothing": one["cold_start"], **(one["shifted"] or {})}
        for what, points in curves.items():
            rows += [[name, what, point["requests"], point["accuracy"]] for point in points]
    marks = [mark for mark in MARKS if mark <= max(row[2] for row in rows)]
    titles = {"from nothing": "From nothing, training requests", "learning": "Another distribution"}

    def draw(figure: "Figure") -> None:
        panels = figure.subplots(1, 2, sharey=True)
        for axes, (what, title) in zip(panels, titles.items(), strict=True):
            for name in results:
                style = {**line_style(name), "linestyle": SOLID}
                _curve(axes, rows, name, what, label=name, **style)
                if what == "learning":
                    still = {**style, "linestyle": DASHED, "markerfacecolor": "none"}
                    _curve(axes, rows, name, "frozen", **still)
            axes.set_xscale("log")
            axes.set_xticks(marks, [str(mark) for mark in marks])
            axes.minorticks_off()
            axes.set(title=title, xlabel="requests served")
        panels[0].set(ylabel="accuracy", ylim=(0, None))
        panels[1].plot([], [], color=muted_color(), linestyle=DASHED, label="frozen")
        draw_legend(figure, panels[1])

    page.figure(
        "accuracy-while-serving",
        "Accuracy of predictors that learn while serving",
        draw,
        ["predictor", "curve", "requests", "accuracy"],
        rows,
        note="Accuracy of the requests since the point before. Left: an empty predictor. Right: as "
        "fitted, on prompts of another distribution, learning from them (lines) or not (dashed).",
        inches=(8, 3.8),
    )


def _curve(axes: Any, rows: list[list[Any]], name: str, what: str, **style: Any) -> None:
    mine = [row for row in rows if row[:2] == [name, what] and row[3] is not None]
    axes.plot([row[2] for row in mine], [row[3] for row in mine], **style)
