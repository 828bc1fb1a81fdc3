"""Figures and tables of the value and cost of forecasts: caches, trace size, drift, latency."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from runtime.policy.eviction.registry import EVICTIONS
from runtime.tools.report.figures import muted_color, text_color
from runtime.tools.report.html_report import HtmlReport
from runtime.tools.report.line_styles import draw_legend, draw_lines, line_style
from runtime.tools.report.table_cells import Cell
from train.drift import MARKS
from train.report.forecasts import AGAIN, Table
from train.report.measured import HitRateRow

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BOUND = "belady"


def hit_rate(page: HtmlReport, rows: Sequence[HitRateRow], *, num_tokens: int) -> None:
    """Every eviction policy against cache size, between LRU and the bound."""
    sizes = sorted({row.cache_percent for row in rows})
    if any(row.hit_rate is None for row in rows):
        page.text("Hit rate against cache size", ["The trace has no generated tokens."])
        return
    rates = by_policy(rows, "hit_rate")
    gaps = by_policy(rows, "gap_closed")
    middle = sizes.index(50) if 50 in sizes else 0
    order = sorted(rates, key=lambda name: -(rates[name][middle] or 0.0))
    places = [name for name in EVICTIONS if name != BOUND]

    def draw(figure: "Figure") -> None:
        panels = figure.subplots(1, 2)
        titles = ("Hit rate", "Of the way from LRU to the bound")
        for axes, values, title in zip(panels, (rates, gaps), titles, strict=True):
            series = {name: (sizes, one) for name, one in values.items() if name != BOUND}
            draw_lines(axes, series, places=places)
            bound = values.get(BOUND, [])
            style = {"color": text_color(), "linewidth": 2.4, "marker": "o", "label": BOUND}
            axes.plot(
                sizes[: len(bound)], [float("nan") if v is None else v for v in bound], **style
            )
            axes.set(title=title, xlabel="cache, % of all experts")
            axes.set_xticks(sizes)
        panels[0].set(ylim=(0, 1))
        draw_legend(figure, panels[0], order=order)

    note = (
        "Share of the experts that generated tokens need which are in the arena when their router "
        f"asks; nothing is prefetched, the arena is divided by layers, {num_tokens:,} generated "
        "held-out tokens. `belady` knows the future: the bound. The legend is in the order at 50 %."
    )
    if "reuse" not in rates:
        note += " `reuse` asks a trained forecaster: `moecast train predictor=all` trains it."
    columns = ("cache_percent", "eviction", "hit_rate", "gap_closed")
    page.figure(
        "hit-rate",
        "Hit rate against cache size",
        draw,
        columns,
        [[getattr(row, key) for key in columns] for row in rows],
        note=note,
        inches=(8, 4.2),
    )


def by_policy(rows: Sequence[HitRateRow], key: str) -> dict[str, list[float | None]]:
    """Return the values of each policy in the order of the cache's size."""
    policies: dict[str, list[float | None]] = {}
    for row in sorted(rows, key=lambda row: row.cache_percent):
        policies.setdefault(row.eviction, []).append(getattr(row, key))
    return policies


def keeping(page: HtmlReport, found: Mapping[str, Any] | None) -> None:
    """Hit rates of the learned `reuse` among the other policies, on the longer replay."""
    if not found:
        return
    policies: list[str] = []
    rows: list[list[Cell]] = []
    for stream, budgets in found["hit_rates"].items():
        for phase in ("decode", "prefill"):
            for budget, one in budgets.items():
                policies = list(one)
                rates = [one[policy][phase] for policy in policies]
                if rates[0] is not None:
                    gap = one["reuse"][f"{phase}_gap_closed"]
                    rows.append([stream, phase, budget, *rates, gap])
    page.table(
        "What reuse keeps",
        ["requests, arena", "phase", "cache", *policies, "gap closed by reuse"],
        rows,
        note=f"{found['definition']}.",
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
        page.text("Accuracy against trace size", ["Not measured.", HOW])
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
        for place, (name, found) in enumerate(points.items()):
            axes.plot(
                [tokens for tokens, _ in found],
                [row["mean_accuracy"] for _, row in found],
                label=name,
                **line_style(place),
            )
        axes.set_xscale("log", base=2)
        ticks = sorted({tokens for _, tokens in best})
        axes.set_xticks(ticks, [thousands(tokens) for tokens in ticks])
        axes.minorticks_off()
        axes.set(xlabel="training tokens", ylabel="mean accuracy, held out", ylim=(0, 1))
        order = sorted(points, key=lambda name: -points[name][-1][1]["mean_accuracy"])
        draw_legend(figure, axes, order=order)

    columns = ("predictor", "horizon", "train_tokens", "prompts", "width", "passes",
               "mean_accuracy", "worst_layer_accuracy")  # fmt: skip
    page.figure(
        "trace-size",
        "Accuracy against trace size",
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
    batches = sorted({int(batch) for one in table.values() for batch in one["latency_us"]})
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
    known = {name: one["shifted"] for name, one in table.items() if one["shifted"]}
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


def drift(page: HtmlReport, found: Mapping[str, Any] | None) -> None:
    """Cold start, and another distribution with and without learning."""
    if not found:
        page.text(
            "Learning while serving",
            ["Not measured: `moecast train drift=true` with the same options measures it, for "
             "the predictors that learn while they serve."],
        )  # fmt: skip
        return
    rows: list[list[Any]] = []
    for name, one in found.items():
        curves = {"from nothing": one["cold_start"], **(one["shifted"] or {})}
        for what, points in curves.items():
            rows += [[name, what, point["requests"], point["accuracy"]] for point in points]
    marks = [one for one in MARKS if one <= max(row[2] for row in rows)]
    titles = {"from nothing": "From nothing, training requests", "learning": "Another distribution"}

    def draw(figure: "Figure") -> None:
        panels = figure.subplots(1, 2, sharey=True)
        for axes, (what, title) in zip(panels, titles.items(), strict=True):
            for place, name in enumerate(found):
                style = {**line_style(place), "linestyle": "-"}
                _curve(axes, rows, name, what, label=name, **style)
                if what == "learning":
                    still = {**style, "linestyle": (0, (4, 1.6)), "markerfacecolor": "none"}
                    _curve(axes, rows, name, "frozen", **still)
            axes.set_xscale("log")
            axes.set_xticks(marks, [str(mark) for mark in marks])
            axes.minorticks_off()
            axes.set(title=title, xlabel="requests served")
        panels[0].set(ylabel="accuracy", ylim=(0, None))
        panels[1].plot([], [], color=muted_color(), linestyle=(0, (4, 1.6)), label="frozen")
        draw_legend(figure, panels[1])

    page.figure(
        "drift",
        "Learning while serving",
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
