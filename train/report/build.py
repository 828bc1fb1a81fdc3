"""The page of a training run, from its results.json and its trace."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from collect.traces import Trace
from predictors.base import Predictor
from predictors.metrics import DEFINITIONS
from runtime.tools.report.html_report import HtmlReport
from runtime.tools.report.table_cells import Cell
from train.report import forecasts, patterns, serving
from train.report.growth import measure_growth
from train.report.hit_rates import measure_hit_rates
from train.report.routing import count_routing
from train.table import machines_of

FOLDER = "report"
"""Folder of the report inside the run folder."""
REPLAY_TOKENS = 200


def make_page(
    results: Mapping[str, Any],
    trace: Trace,
    *,
    reuse_predictor: Predictor | None = None,
    ceiling: Mapping[str, Any] | None = None,
    replay_tokens: int = REPLAY_TOKENS,
) -> HtmlReport:
    """Every section in order; what the results lack is measured on the trace, held out.

    Args:
        results: what `train.commands.train` returned, or its JSON.
        reuse_predictor: a `reuse` forecaster, to draw its hit rate among the policies'.
        ceiling: what `benchmarks/ceiling.py` wrote.
    """
    table, spec = results["predictors"], trace.spec
    page = HtmlReport(
        f"Expert forecasts for {spec.model_id}",
        f"{len(table)} predictors, {spec.num_layers} layers of {spec.num_experts} experts, "
        f"top {spec.top_k}; {results['trace']['held_out_tokens']:,} of "
        f"{results['trace']['tokens']:,} tokens held out",
    )
    summary(page, table, results["setting"])
    page.text(
        "What the figures mean",
        [f"`{name}`: {meaning}." for name, meaning in DEFINITIONS.items()],
    )
    forecasts.accuracy_by_layer(page, table)
    forecasts.good_pred_by_horizon(page, table, results["setting"])
    forecasts.calibration(page, table)
    serving.shifted_table(page, table)
    serving.latency_table(page, table, spec.num_layers)
    others = list(ceiling["rows"]) if ceiling else own_rows(results)
    source = f"`benchmarks/ceiling.py` on `{ceiling['dataset']}`" if ceiling else None
    serving.trace_size(page, [*others, *measure_growth(trace)], others=source)
    serving.drift(page, results.get("drift"))
    routing = count_routing(trace)
    if routing is None:
        page.text("Routing", ["No held-out request is long enough to show its routing."])
    else:
        patterns.heatmaps(page, routing, spec)
        patterns.entropies(page, routing, spec)
        patterns.popularity(page, routing, spec)
    rates = measure_hit_rates(trace, reuse_predictor, num_tokens=replay_tokens)
    serving.hit_rate(page, rates, num_tokens=replay_tokens)
    serving.keeping(page, results.get("keeping"))
    return page


def own_rows(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The learned predictors of this run as one point each: all of its training requests."""
    training, trace = results["training"], results["trace"]
    if training is None:
        return []
    return [
        {
            "predictor": kind,
            "horizon": None,
            "train_tokens": trace["tokens"] - trace["held_out_tokens"],
            "width": training["width"],
            "passes": training["max_epochs"],
            "mean_accuracy": results["predictors"][kind]["mean_accuracy"],
            "worst_layer_accuracy": results["predictors"][kind]["worst_layer_accuracy"],
        }
        for kind in training["kinds"]
    ]


def summary(page: HtmlReport, table: forecasts.Table, setting: str) -> None:
    machines = machines_of(table)
    columns = ["predictor", "layers ahead", "accuracy", "worst layer"]
    columns += [f"{what}, {name}" for name in machines for what in ("FetchRate", "GoodPred")]
    columns += ["shifted set", "us a layer", "KiB"]
    rows: list[list[Cell]] = []
    for name, one in table.items():
        distances = [at for at in one["by_horizon"] or {} if at.isdigit()]
        ahead = f"{min(distances)} to {max(distances)}" if distances else one["horizon"]
        cells: list[Cell] = [name, ahead, one["mean_accuracy"], one["worst_layer_accuracy"]]
        for machine in machines:
            figures = one["hardware"][machine]
            cells += [figures["mean_fetch_rate"], figures["mean_good_pred"]]
        alone = one["latency_us"]["1"]
        cells += [
            one["shifted"]["mean_accuracy"] if one["shifted"] else None,
            None if alone is None else alone["layer_p50"],
            one["bytes"] / 1024,
        ]
        rows.append(cells)
    page.table(
        "Summary",
        columns,
        rows,
        note=f"FetchRate and GoodPred: {setting}. Means are over the layers that a predictor "
        "forecasts; `us a layer`: median time of one layer's events at batch 1.",
    )


def write_report(page: HtmlReport, run_dir: Path) -> Path:
    """Draws and writes the page; returns its path."""
    path = page.write(run_dir / FOLDER)
    sys.stderr.write(f"report: {path}\n")
    return path
