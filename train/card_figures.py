"""The figures of model cards, drawn as the report draws them."""

from collections.abc import Mapping

from runtime.tools.report.figures import render_figure, rows_height, wide
from train.eviction_eval import HitRates
from train.report.forecasts import (
    ACCURACY_HEADING,
    ACCURACY_INCHES,
    Predictors,
    accuracy_table,
    draw_accuracy,
)
from train.report.serving import HIT_RATE_HEADING, draw_hit_rates
from zoo.card import CardFigure

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


def draw_reuse_figure(tables: Mapping[str, Mapping[str, HitRates]]) -> CardFigure | None:
    """Draws the hit rate of each policy by cache size, `tables[budget][policy]`, in decode."""
    records = [
        {"cache_percent": budget.rstrip("%"), "eviction": policy, "hit_rate": rates.decode}
        for budget, policies in tables.items()
        for policy, rates in policies.items()
    ]
    if any(record["hit_rate"] is None for record in records):
        return None
    inches = (wide(len(tables)), rows_height(len(records) // len(tables)))
    png = render_figure(draw_hit_rates, records, inches=inches, title=HIT_RATE_HEADING)
    return CardFigure(png, "Hit rate of each eviction policy on held-out generated tokens")
