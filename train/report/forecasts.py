"""Figures of how right the predictors are: by layer, by distance, by how sure they are.

Every function adds sections to a page from what results.json holds of the predictors.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from runtime.tools.report.figures import muted_color
from runtime.tools.report.html_report import HtmlReport
from runtime.tools.report.line_styles import draw_legend, draw_lines, line_style
from runtime.tools.report.table_cells import Cell
from train.accuracy import ENTRY

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Table = Mapping[str, Mapping[str, Any]]
"""results.json's `predictors`."""
AGAIN = "the same `moecast train` command on the same run folder adds it and trains nothing anew"


def accuracy_by_layer(page: HtmlReport, table: Table) -> None:
    """Draw the accuracy of each layer (ProMoE, figure 8)."""
    names, num_layers = list(table), len(next(iter(table.values()))["accuracy"])

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        series = {name: (range(num_layers), table[name]["accuracy"]) for name in names}
        draw_lines(axes, series, places=names)
        axes.set(xlabel="layer", ylabel="accuracy", ylim=(0, 1))
        axes.locator_params(axis="x", integer=True)
        order = sorted(table, key=lambda name: -(table[name]["mean_accuracy"] or 0.0))
        draw_legend(figure, axes, order=order)

    rows: list[list[Cell]] = [
        [layer, *(table[name]["accuracy"][layer] for name in names)] for layer in range(num_layers)
    ]
    page.figure(
        "accuracy-by-layer",
        "Accuracy by layer",
        draw,
        ["layer", *names],
        rows,
        note="Held-out tokens; the legend is in the order of the means. A line begins at the first "
        "layer that its predictor forecasts. As figure 8 of promoe.",
        inches=(8, 4.6),
    )


def points_by_horizon(table: Table) -> list[dict[str, Any]]:
    """A row for each predictor and distance: accuracy, FetchRate and GoodPred; null: not measured.

    Variants of a kind (`skip`, `skip-2`) are one line.
    """
    rows = []
    for name, one in table.items():
        if one["by_horizon"]:
            for horizon, at in one["by_horizon"].items():
                if horizon != ENTRY:
                    rows.append(_point(name, int(horizon), at))
        elif one["horizon"] is not None:
            variant = f"-{one['horizon']}"
            rows.append(_point(name.removesuffix(variant), one["horizon"], one))
    return sorted(rows, key=lambda row: row["horizon"])


def _point(name: str, horizon: int, at: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "predictor": name,
        "horizon": horizon,
        "accuracy": at["mean_accuracy"],
        "worst_layer": at["worst_layer_accuracy"],
        "fetch_rate": at.get("mean_fetch_rate"),
        "good_pred": at.get("mean_good_pred"),
    }


def good_pred_by_horizon(page: HtmlReport, table: Table, setting: str) -> None:
    rows = points_by_horizon(table)
    if not rows:
        return
    kinds = list(dict.fromkeys(row["predictor"] for row in rows))
    figures = ("accuracy", "fetch_rate", "good_pred")
    titles = ("Accuracy", "FetchRate", "GoodPred")

    def draw(figure: "Figure") -> None:
        panels = figure.subplots(1, 3, sharey=True)
        for axes, key, title in zip(panels, figures, titles, strict=True):
            series = {
                kind: (
                    [row["horizon"] for row in rows if row["predictor"] == kind],
                    [row[key] for row in rows if row["predictor"] == kind],
                )
                for kind in kinds
            }
            draw_lines(axes, series, places=list(table), markersize=6)
            axes.set(title=title, xlabel="layers ahead", ylim=(0, 1), xlim=(-0.3, 3.3))
            axes.set_xticks(range(4))
        draw_legend(figure, panels[0])

    page.figure(
        "good-pred-by-horizon",
        "GoodPred against horizon",
        draw,
        list(rows[0]),
        [list(row.values()) for row in rows],
        note="Means over the layers that are forecast from that far: 0 is from the layer's own "
        "input, before its attention. A longer distance leaves more time to fetch and is harder to "
        f"foresee. Each distance by itself: {setting}.",
        inches=(8, 3.6),
    )


def calibration(page: HtmlReport, table: Table) -> None:
    """Reliability diagram and expected calibration error."""
    known = {
        name: one["calibration"]
        for name, one in table.items()
        # A kind that forecast nothing has bins, and nothing in them.
        if one.get("calibration") and one["calibration"]["error"] is not None
    }
    if not known:
        page.text("Calibration", [f"Not in these results: {AGAIN}."])
        return
    rows: list[list[Cell]] = [
        [name, one["error"], place, *values]
        for name, one in known.items()
        for place, values in enumerate(zip(one["pairs"], one["score"], one["chosen"], strict=True))
    ]

    def draw(figure: "Figure") -> None:
        left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
        left.plot([0, 1], [0, 1], color=muted_color(), linewidth=1, linestyle=(0, (2, 2)))
        series = {
            name: (_known(one["score"]), _known(one["chosen"])) for name, one in known.items()
        }
        draw_lines(left, series, places=list(table))
        left.set(xlim=(0, 1), ylim=(0, 1), title="Reliability")
        left.set(xlabel="score", ylabel="share that was chosen")
        order = sorted(known, key=lambda name: known[name]["error"], reverse=True)
        for height, name in enumerate(order):
            error = known[name]["error"]
            right.barh(
                height, error, color=line_style(list(table).index(name))["color"], height=0.62
            )
            right.annotate(
                f"{error:.3f}", (error, height), (4, 0), textcoords="offset points", va="center",
                fontsize=8.5, color=muted_color(),
            )  # fmt: skip
        right.set_yticks(range(len(order)), order)
        right.grid(axis="y", visible=False)
        right.margins(x=0.18)
        right.set(title="Expected calibration error", xlabel="mean |score - share chosen|")

    page.figure(
        "calibration",
        "Calibration: is a score the chance of being chosen?",
        draw,
        ["predictor", "error", "bin", "pairs", "mean_score", "share_chosen"],
        rows,
        note="All layers, every pair of a held-out token and an expert, in 15 equal bins of the "
        "score; on the dotted line a score is the chance. A bin counts in the error as often as it "
        "has pairs, and most pairs have a score near 0: a predictor that says 0 of everything has "
        "a small error too. Colours are those of the figures above.",
        inches=(8, 4.2),
    )


def _known(values: list[float | None]) -> list[float]:
    return [value for value in values if value is not None]
