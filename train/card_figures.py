"""The figures of model cards, drawn as the report draws them."""

from collections.abc import Mapping

from runtime.tools.report.figures import LIGHT, render_figure
from train.eviction_eval import HitRates
from train.report.forecasts import ACCURACY_HEADING, ACCURACY_INCHES, Table, draw_accuracy
from train.report.serving import draw_hit_rates
from zoo.card import CardFigure

BASELINE = "skip"
"""The kind that needs no training: the next layer's router applied to this layer's state."""


def draw_accuracy_figure(name: str, table: Table) -> CardFigure | None:
    """Draws a predictor's accuracy by layer, next to that of `skip`; None if it has none."""
    shown = {key: table[key] for key in dict.fromkeys((name, BASELINE)) if key in table}
    if not any(value is not None for value in shown[name]["accuracy"]):
        return None
    png = render_figure(
        lambda figure: draw_accuracy(figure, shown),
        LIGHT,
        inches=ACCURACY_INCHES,
        kind="png",
        title=ACCURACY_HEADING,
    )
    baseline = f", and of {BASELINE}, which is not trained" if len(shown) > 1 else ""
    return CardFigure(png, f"Accuracy of {name} by layer on held-out tokens{baseline}")


def draw_reuse_figure(tables: Mapping[str, Mapping[str, HitRates]]) -> CardFigure | None:
    """Draws the hit rate of each policy by cache size, `tables[budget][policy]`, in decode."""
    budgets = list(tables)
    rates = {
        policy: [tables[budget][policy].decode for budget in budgets]
        for policy in tables[budgets[0]]
    }
    if any(rate is None for series in rates.values() for rate in series):
        return None
    sizes = [int(budget.rstrip("%")) for budget in budgets]
    png = render_figure(
        lambda figure: draw_hit_rates(figure, sizes, rates),
        LIGHT,
        inches=(9.2, 1.3 + 0.29 * len(rates)),
        kind="png",
        title="Hit rate of each eviction policy, by cache size",
    )
    return CardFigure(png, "Hit rate of each eviction policy on held-out generated tokens")
