"""The page of a training run, and its summary for the terminal."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from collect.traces import Trace
from predictors.metrics import DEFINITIONS
from predictors.table import Table, TableColumn, decimals, size
from runtime.tools.report.html_report import HtmlReport
from runtime.tools.report.provenance import read_provenance
from train.config import TrainConfig
from train.eviction_eval import PER_LAYER
from train.report import forecasts, routing, serving

SHOWN = (
    "accuracy",
    "predicted",
    "replay_accuracy",
    "fetch_rate",
    "good_pred",
    "promoe_good_pred",
    "tpot_ms",
)
MACHINE_COLUMNS = {
    "mean_tpot_ms": ("TPOT ms", 2),
    "mean_fetch_rate": ("FetchRate", 3),
    "mean_good_pred": ("GoodPred", 2),
    "mean_good_pred_covered": ("covered", 30),
    "mean_promoe_good_pred": ("ProMoE's", 30),
}
"""Figures of a simulated machine: heading and rank by their key in results.json."""
MEANING = (
    "Accuracy: mean over the layers that a predictor covers, and its worst layer. In GoodPred, "
    "layers without forecasts count 0; covered: the mean over the others; ProMoE's: as that paper "
    "counts, with experts that needed no transfer as fetched. `us`: median time of one layer's "
    "events, batch 1, on this machine; shifted: accuracy on prompts of another distribution."
)


def describe_distances(row: Mapping[str, Any]) -> str | None:
    """Return the least and the greatest number of layers ahead that a predictor forecasts."""
    distances = [at for at in row.get("by_horizon") or {} if at.isdigit()]
    return f"{min(distances)} to {max(distances)}" if distances else row.get("horizon")


def list_machines(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    return list(next(iter(results.values()))["hardware"])


def describe_summary(results: Mapping[str, Mapping[str, Any]], setting: str) -> str:
    """Return what the columns of the summary are."""
    numbered = (f"{i} is {name}" for i, name in enumerate(list_machines(results), start=1))
    return f"{MEANING} TPOT, FetchRate and GoodPred: {setting}; {', '.join(numbered)}."


def summary_table(results: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return a table with a row for each predictor; `describe_summary` explains its columns."""
    machines = list_machines(results)
    columns = [
        TableColumn("predictor"),
        TableColumn("ahead", describe_distances, rank=6),
        TableColumn("accuracy", "mean_accuracy", decimals_3, rank=1),
        TableColumn("worst", "worst_layer_accuracy", decimals_3, rank=5),
        *(
            TableColumn(
                heading if len(machines) == 1 else f"{heading} {place}",
                ("hardware", machine, key),
                decimals_3,
                rank=rank + 10 * (place - 1),
            )
            for place, machine in enumerate(machines, start=1)
            for key, (heading, rank) in MACHINE_COLUMNS.items()
        ),
        TableColumn("us", ("latency_us", "1", "layer_p50"), decimals, rank=4),
        TableColumn("bytes", "bytes", size, rank=20),
        TableColumn("shifted", ("shifted", "mean_accuracy"), decimals_3, rank=19),
    ]
    rows = [{"predictor": name, **result} for name, result in results.items()]
    elsewhere = "results.json and report/report.html have them"
    return Table(columns=columns, rows=rows, elsewhere=elsewhere)


def decimals_3(value: float) -> str:
    return decimals(value, 3)


def show(results: Mapping[str, Mapping[str, Any]], *, setting: str) -> None:
    """Prints the summary, with the definitions above the numbers."""
    console = Console()
    for metric in SHOWN:
        console.print(f"{metric}: {DEFINITIONS[metric]}", highlight=False)
    console.print()
    summary_table(results).print(console)
    console.print(
        f"{describe_summary(results, setting)} A dash: no forecast (no earlier layer to "
        "forecast it from), or not measured. Figures of every layer: results.json, and figures in "
        "report/report.html.",
        highlight=False,
    )


FOLDER = "report"
"""Folder of the report inside the run folder."""


def draw_report(
    results: Mapping[str, Any], trace: Trace, config: TrainConfig
) -> tuple[HtmlReport, Path]:
    """Draw the page of a run from its results and its trace; return it, and where it is.

    How uneven routing is, is measured on the trace, held out.
    """
    table, spec = results["predictors"], trace.spec
    page = HtmlReport(
        f"Expert forecasts for {spec.model_id}",
        f"{len(table)} predictors, {spec.num_layers} layers of {spec.num_experts} experts, "
        f"top {spec.top_k}; {results['trace']['held_out_tokens']:,} of "
        f"{results['trace']['tokens']:,} tokens held out",
        provenance=read_provenance(config.folder),
    )
    page.add("Summary", summary_table(table), note=describe_summary(table, results["setting"]))
    meanings = [f"`{name}`: {meaning}." for name, meaning in DEFINITIONS.items()]
    page.add("What the figures mean", note="\n".join(meanings))
    forecasts.accuracy_by_layer(page, table)
    forecasts.good_pred_by_horizon(page, table, results["setting"])
    forecasts.calibration(page, table)
    serving.latency_table(page, table, spec.num_layers)
    routing.popularity(page, trace)
    if keeping := results.get("keeping"):
        rates, num_tokens = keeping["hit_rates"][PER_LAYER], config.replay_tokens
        serving.hit_rate(page, rates, num_tokens=num_tokens)
    path = page.write(config.folder / FOLDER)
    sys.stderr.write(f"report: {path}\n")
    return page, path
