"""Figures of how right the predictors are: by layer, by distance, by how sure they are.

Every function adds sections to a report from what results.json holds of the predictors.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from predictors.metrics import ENTRY
from predictors.table import Table
from runtime.tools.report.figures import (
    Record,
    collect,
    collect_columns,
    draw_panels,
    render_figure,
    wide,
)
from runtime.tools.report.html_report import HtmlReport
from zoo.card import CardFigure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Predictors = Mapping[str, Mapping[str, Any]]
"""results.json's `predictors`."""
ACCURACY_HEADING = "Accuracy of the forecasts by layer"
ACCURACY_INCHES = (8, 4.8)


def accuracy_table(predictors: Predictors) -> Table:
    """Return the accuracy of each layer, a column for each predictor."""
    columns = [one["accuracy"] for one in predictors.values()]
    rows = [(layer, *values) for layer, values in enumerate(zip(*columns, strict=True))]
    return Table.of(["layer", *predictors], rows)


def draw_accuracy(figure: "Figure", records: Sequence[Record]) -> None:
    """Draw a line for each predictor: the accuracy of each layer."""
    panels = {"": collect_columns(records, "layer")}
    draw_panels(figure, panels, xlabel="layer", ylabel="accuracy", ylim=(0, 1))


def accuracy_by_layer(report: HtmlReport, predictors: Predictors) -> None:
    """Draw the accuracy of each layer (ProMoE, figure 8)."""
    report.add(
        ACCURACY_HEADING,
        accuracy_table(predictors),
        draw_accuracy,
        name="accuracy-by-layer",
        note="Share of the chosen experts that were forecast, on held-out tokens. A line begins at "
        "the first layer that its predictor forecasts. As in ProMoE, figure 8.",
        inches=ACCURACY_INCHES,
    )


BASELINE = "skip"
"""The kind that needs no training: the next layer's router applied to this layer's state."""


def draw_accuracy_figure(name: str, predictors: Predictors) -> CardFigure | None:
    """Draws a predictor's accuracy by layer, next to that of `skip`; None if it has none."""
    shown = {key: predictors[key] for key in (name, BASELINE) if key in predictors}
    if not any(value is not None for value in shown[name]["accuracy"]):
        return None
    records = accuracy_table(shown).records()
    png = render_figure(draw_accuracy, records, inches=ACCURACY_INCHES, title=ACCURACY_HEADING)
    baseline = f", and of {BASELINE}, which is not trained" if len(shown) > 1 else ""
    return CardFigure(png, f"Accuracy of {name} by layer on held-out tokens{baseline}")


HORIZON = ("predictor", "horizon", "accuracy", "worst_layer", "fetch_rate", "good_pred")


def points_by_horizon(predictors: Predictors) -> list[tuple[Any, ...]]:
    """Return the values of `HORIZON` for each predictor and distance; None: not measured.

    Variants of a kind (`skip`, `skip-2`) are one line.
    """
    points: list[tuple[str, int, Mapping[str, Any]]] = []
    for name, one in predictors.items():
        if one["by_horizon"]:
            measured = one["by_horizon"].items()
            points += [(name, int(ahead), at) for ahead, at in measured if ahead != ENTRY]
        elif one["horizon"] is not None:
            points.append((name.removesuffix(f"-{one['horizon']}"), one["horizon"], one))
    keys = ("mean_accuracy", "worst_layer_accuracy", "mean_fetch_rate", "mean_good_pred")
    rows = [(name, ahead, *(at.get(key) for key in keys)) for name, ahead, at in points]
    return sorted(rows, key=lambda row: row[1])


def good_pred_by_horizon(report: HtmlReport, predictors: Predictors, setting: str) -> None:
    """Draw accuracy, FetchRate and GoodPred by distance."""
    figures = {"Accuracy": "accuracy", "FetchRate": "fetch_rate", "GoodPred": "good_pred"}
    if not (rows := points_by_horizon(predictors)):
        return
    report.add(
        "Accuracy, FetchRate and GoodPred by distance",
        Table.of(HORIZON, rows),
        lambda figure, records: draw_panels(
            figure,
            {
                title: collect(records, "horizon", key, by="predictor")
                for title, key in figures.items()
            },
            xlabel="layers ahead",
            ylabel="",
            labels=True,
            ylim=(0, 1),
        ),
        name="good-pred-by-horizon",
        note="Means over the layers that are forecast from that far: 0 is from the layer's own "
        "input, before its attention. A longer distance leaves more time to fetch and is harder to "
        f"foresee. Each distance by itself: {setting}.",
        inches=(wide(len(figures)), 3.6),
    )


def calibration(report: HtmlReport, predictors: Predictors) -> None:
    """Draw how often a score comes true, with the expected calibration error."""
    known = {
        name: one["calibration"]
        for name, one in predictors.items()
        # A kind that forecast nothing has bins, and nothing in them.
        if one["calibration"]["error"] is not None
    }
    if not known:
        return
    rows = [
        [name, one["error"], place, *values]
        for name, one in sorted(known.items(), key=lambda item: item[1]["error"])
        for place, values in enumerate(zip(one["pairs"], one["score"], one["chosen"], strict=True))
    ]

    def draw(figure: "Figure", records: Sequence[Record]) -> None:
        counted = [record for record in records if record["pairs"]]
        panels = {
            f"{name}\nerror {known[name]['error']:.3f}": {name: line, "even": ([0, 1], [0, 1])}
            for name, line in collect(counted, "mean_score", "share_chosen", by="predictor").items()
        }
        draw_panels(
            figure,
            panels,
            xlabel="score",
            ylabel="share chosen",
            legend=False,
            xlim=(0, 1),
            ylim=(0, 1),
        )

    report.add(
        "Calibration: how often a score comes true",
        Table.of(["predictor", "error", "bin", "pairs", "mean_score", "share_chosen"], rows),
        draw,
        name="calibration",
        note="All layers, every pair of a held-out token and an expert, in 15 equal bins of the "
        "score; on the dotted line a score is the chance. The error is the mean distance to it. A "
        "bin counts in the error as often as it has pairs, and most pairs have a score near 0: a "
        "predictor that says 0 of everything has a small error too.",
        inches=(9, 0.7 + 2.1 * -(-len(known) // 5)),
    )
