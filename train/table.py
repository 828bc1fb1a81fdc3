"""The table of figures per layer, for people, from the same numbers that go into results.json."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from predictors.metrics import DEFINITIONS

SHOWN = ("accuracy", "fetch_rate", "good_pred")


def cell(value: float | None) -> str:
    """A dash where nothing was forecast or measured, never a zero."""
    return "-" if value is None else f"{value:.3f}"


def layer_table(metric: str, results: Mapping[str, Mapping[str, Any]]) -> Table:
    """One figure: a row for each layer, a column for each predictor, the mean below."""
    table = Table()
    table.add_column("layer", justify="right")
    for name in results:
        table.add_column(name, justify="right")
    for layer in range(len(next(iter(results.values()))[metric])):
        table.add_row(str(layer), *(cell(one[metric][layer]) for one in results.values()))
    table.add_section()
    table.add_row("mean", *(cell(one[f"mean_{metric}"]) for one in results.values()))
    return table


def show(
    results: Mapping[str, Mapping[str, Any]], *, setting: str, console: Console | None = None
) -> None:
    """Prints every figure's table, the definitions above the numbers."""
    console = console or Console()
    for metric in SHOWN:
        console.print(f"{metric}: {DEFINITIONS[metric]}", highlight=False)
        console.print(layer_table(metric, results))
    console.print(
        f"fetch_rate and good_pred: {setting}. Means are over the layers that a predictor "
        "forecasts; a dash: no forecast (no earlier layer to forecast it from).",
        highlight=False,
    )
