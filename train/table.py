"""Tables of the results in the terminal."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from predictors.metrics import DEFINITIONS
from predictors.table import Table

SHOWN = ("accuracy", "predicted", "replay_accuracy", "fetch_rate", "good_pred", "resident")


MACHINE_COLUMNS = (
    *("mean_fetch_rate", "mean_good_pred", "mean_good_pred_covered"),
    "mean_resident",
)


def cell(value: float | None) -> str:
    """Format a value; a dash where nothing was forecast or measured."""
    return "-" if value is None else f"{value:.3f}"


def size(num_bytes: int) -> str:
    for unit, width in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= width:
            return f"{num_bytes / width:.1f} {unit}"
    return f"{num_bytes} B"


def summary_table(results: Mapping[str, Mapping[str, Any]]) -> Table:
    """Returns a table with a row for each predictor.

    Columns: accuracy, then for each machine (numbered) FetchRate, GoodPred over all layers and over
    the covered ones and the share that was resident anyway, median latency of one layer's events at
    batch 1, bytes, accuracy on another distribution.
    """
    machines = list_machines(results)
    columns = ["predictor", "acc", "worst"]
    names = ("fetch", "good", "covered", "resident")
    columns += [f"{name} {i}" for i in range(1, len(machines) + 1) for name in names]
    columns += ["us", "bytes", "shifted"]
    rows = []
    for name, result in results.items():
        cells = [cell(result["mean_accuracy"]), cell(result["worst_layer_accuracy"])]
        for machine in machines:
            figures = result["hardware"][machine]
            cells += [cell(figures[key]) for key in MACHINE_COLUMNS]
        alone = result["latency_us"]["1"]
        shifted = result["shifted"]
        cells += [
            "-" if alone is None else f"{alone['layer_p50']:.0f}",
            size(result["bytes"]),
            cell(None if shifted is None else shifted["mean_accuracy"]),
        ]
        rows.append([name, *cells])
    return Table.of(
        columns,
        rows,
        importance=("acc", "good 1", "fetch 1", "us", "bytes", "shifted"),
        elsewhere="results.json and report/report.html have them",
    )


def list_machines(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    return list(next(iter(results.values()))["hardware"])


def show(
    results: Mapping[str, Mapping[str, Any]], *, setting: str, console: Console | None = None
) -> None:
    """Prints the summary, with the definitions above the numbers."""
    console = console or Console()
    for metric in SHOWN:
        console.print(f"{metric}: {DEFINITIONS[metric]}", highlight=False)
    console.print()
    summary_table(results).print(console)
    numbered = (f"{i} is {name}" for i, name in enumerate(list_machines(results), start=1))
    console.print(
        "acc, worst: accuracy, mean and worst layer; fetch, good, covered, resident: fetch_rate, "
        "good_pred, good_pred over the covered layers and resident, "
        f"{', '.join(numbered)}; us: median time of one layer's events, batch 1, on this machine; "
        "shifted: accuracy on prompts of another distribution.",
        highlight=False,
    )
    console.print(
        f"fetch_rate and good_pred: {setting}. Accuracy is a mean over the layers that a predictor "
        "covers; a dash: no forecast (no earlier layer to forecast it from), or not measured. "
        "Figures of every layer: results.json, and figures in report/report.html.",
        highlight=False,
    )
