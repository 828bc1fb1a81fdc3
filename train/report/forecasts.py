"""Figures of how right the predictors are: by layer, by distance, by how sure they are.

Every function adds sections to a page from what results.json holds of the predictors.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from predictors.card_accuracy import ENTRY
from runtime.tools.report.figures import muted_color
from runtime.tools.report.html_report import HtmlReport
from runtime.tools.report.line_labels import draw_legend, draw_lines, label_lines
from runtime.tools.report.series_styles import series_style
from runtime.tools.report.table_cells import Cell

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Table = Mapping[str, Mapping[str, Any]]
"""results.json's `predictors`."""
AGAIN = "the same `moecast train` command on the same run folder adds it and trains nothing anew"


ACCURACY_HEADING = "Accuracy of the forecasts by layer"
ACCURACY_INCHES = (8, 4.8)


def draw_accuracy(figure: "Figure", table: Table) -> None:
    """Draw a line for each predictor: the accuracy of each layer."""
    axes = figure.subplots()
    series = {name: (range(len(row["accuracy"])), row["accuracy"]) for name, row in table.items()}
    draw_lines(axes, series)
    axes.set(xlabel="layer", ylabel="accuracy", ylim=(0, 1))
    axes.set_xmargin(0.02)
    axes.locator_params(axis="x", integer=True)
    label_lines(axes)


def accuracy_by_layer(page: HtmlReport, table: Table) -> None:
    """Draw the accuracy of each layer (ProMoE, figure 8)."""
    names, num_layers = list(table), len(next(iter(table.values()))["accuracy"])
    rows: list[list[Cell]] = [
        [layer, *(table[name]["accuracy"][layer] for name in names)] for layer in range(num_layers)
    ]
    page.figure(
        "accuracy-by-layer",
        ACCURACY_HEADING,
        lambda figure: draw_accuracy(figure, table),
        ["layer", *names],
        rows,
        note="Share of the chosen experts that were forecast, on held-out tokens. A line begins at "
        "the first layer that its predictor forecasts. As in ProMoE, figure 8.",
        inches=ACCURACY_INCHES,
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
            draw_lines(axes, series, markersize=6)
            axes.set(title=title, xlabel="layers ahead", ylim=(0, 1), xlim=(-0.3, 3.3))
            axes.set_xticks(range(4))
        draw_legend(figure, panels[0])

    page.figure(
        "good-pred-by-horizon",
        "Accuracy, FetchRate and GoodPred by distance",
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
        name: row["calibration"]
        for name, row in table.items()
        # A kind that forecast nothing has bins, and nothing in them.
        if row.get("calibration") and row["calibration"]["error"] is not None
    }
    if not known:
        page.text("Calibration", [f"Not in these results: {AGAIN}."])
        return
    rows: list[list[Cell]] = [
        [name, row["error"], place, *values]
        for name, row in known.items()
        for place, values in enumerate(zip(row["pairs"], row["score"], row["chosen"], strict=True))
    ]

    order = sorted(known, key=lambda name: known[name]["error"])
    num_columns = min(5, len(order))
    num_rows = -(-len(order) // num_columns)

    def draw(figure: "Figure") -> None:
        grid = figure.subplots(num_rows, num_columns, squeeze=False, sharex=True, sharey=True)
        for axes in grid.flat[len(order) :]:
            axes.set_visible(False)
        for axes, name in zip(grid.flat, order, strict=False):
            one, style = known[name], series_style(name)
            axes.plot([0, 1], [0, 1], color=muted_color(), linewidth=1, linestyle=(0, (2, 2)))
            axes.plot(
                _known(one["score"]), _known(one["chosen"]), color=style.color, marker="o",
                markersize=3.5, linewidth=1.8,
            )  # fmt: skip
            axes.set(xlim=(0, 1), ylim=(0, 1), xticks=(0, 0.5, 1), yticks=(0, 0.5, 1))
            axes.set_title(f"{name}\nerror {one['error']:.3f}", fontsize=9)
        figure.supylabel("share that was chosen", fontsize=10, color=muted_color())
        for column, axes in enumerate(grid[-1]):
            lowest = axes if axes.get_visible() else grid[-2][column]
            lowest.set_xlabel("score")
            lowest.tick_params(labelbottom=True)

    page.figure(
        "calibration",
        "Calibration: how often a score comes true",
        draw,
        ["predictor", "error", "bin", "pairs", "mean_score", "share_chosen"],
        rows,
        note="All layers, every pair of a held-out token and an expert, in 15 equal bins of the "
        "score; on the dashed line a score is the chance. The error is the mean distance to it. A "
        "bin counts in the error as often as it has pairs, and most pairs have a score near 0: a "
        "predictor that says 0 of everything has a small error too.",
        inches=(8, 0.7 + 1.75 * num_rows),
    )


def _known(values: list[float | None]) -> list[float]:
    return [value for value in values if value is not None]
