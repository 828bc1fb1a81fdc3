"""The page of a training run."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from collect.traces import Trace
from predictors.metrics import DEFINITIONS
from runtime.tools.report.html_report import HtmlReport
from runtime.tools.report.provenance import Provenance, read_provenance
from train.config import TrainConfig
from train.eviction_eval import PER_LAYER
from train.report import forecasts, routing, serving
from train.table import describe_summary, summary_table

FOLDER = "report"
"""Folder of the report inside the run folder."""


def make_page(
    results: Mapping[str, Any],
    trace: Trace,
    *,
    replay_tokens: int,
    provenance: Provenance | None = None,
) -> HtmlReport:
    """Every section in order; how uneven routing is, is measured on the trace, held out.

    `results` is results.json; `replay_tokens` are those behind its hit rates.
    """
    table, spec = results["predictors"], trace.spec
    page = HtmlReport(
        f"Expert forecasts for {spec.model_id}",
        f"{len(table)} predictors, {spec.num_layers} layers of {spec.num_experts} experts, "
        f"top {spec.top_k}; {results['trace']['held_out_tokens']:,} of "
        f"{results['trace']['tokens']:,} tokens held out",
        provenance=provenance,
    )
    summary = summary_table(table)
    page.add("Summary", summary, note=describe_summary(table, results["setting"]))
    meanings = [f"`{name}`: {meaning}." for name, meaning in DEFINITIONS.items()]
    page.add("What the figures mean", note="\n".join(meanings))
    forecasts.accuracy_by_layer(page, table)
    forecasts.good_pred_by_horizon(page, table, results["setting"])
    forecasts.calibration(page, table)
    serving.latency_table(page, table, spec.num_layers)
    routing.popularity(page, trace)
    if keeping := results.get("keeping"):
        serving.hit_rate(page, keeping["hit_rates"][PER_LAYER], num_tokens=replay_tokens)
    return page


def draw_report(
    results: Mapping[str, Any], trace: Trace, config: TrainConfig
) -> tuple[HtmlReport, Path]:
    """Draw the page of a run from its results and its trace; return it, and where it is."""
    assert config.run_dir is not None
    page = make_page(
        results,
        trace,
        replay_tokens=config.replay_tokens,
        provenance=read_provenance(config.run_dir),
    )
    path = page.write(config.run_dir / FOLDER)
    sys.stderr.write(f"report: {path}\n")
    return page, path
