"""The page of a training run."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from collect.traces import Trace
from predictors.base import Predictor
from predictors.metrics import DEFINITIONS
from predictors.registry import REUSE_PREDICTORS
from predictors.spec import ModelSpec
from runtime.tools.report.html_report import HtmlReport
from runtime.tools.report.provenance import Provenance, read_provenance
from train.config import TrainConfig
from train.eviction_eval import rate_all_policies
from train.report import forecasts, routing, serving
from train.table import describe_summary, summary_table
from zoo.load import load_predictor

FOLDER = "report"
"""Folder of the report inside the run folder."""
REPLAY_TOKENS = 200
"""Generated held-out tokens to replay under each eviction policy and cache size, at most."""


def make_page(
    results: Mapping[str, Any],
    trace: Trace,
    *,
    reuse_predictors: Sequence[Predictor] = (),
    replay_tokens: int = REPLAY_TOKENS,
    provenance: Provenance | None = None,
) -> HtmlReport:
    """Every section in order; what the results lack is measured on the trace, held out.

    `results` is results.json.
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
    serving.shifted_table(page, table)
    serving.latency_table(page, table, spec.num_layers)
    routing.popularity(page, trace)
    rates = rate_all_policies(trace, reuse_predictors, num_tokens=replay_tokens)
    serving.hit_rate(page, rates, num_tokens=replay_tokens)
    serving.keeping(page, results.get("keeping"))
    return page


def draw_report(
    results: Mapping[str, Any], trace: Trace, config: TrainConfig
) -> tuple[HtmlReport, Path]:
    """Draw the page of a run from its results and its trace; return it, and where it is."""
    assert config.run_dir is not None
    page = make_page(
        results,
        trace,
        reuse_predictors=load_reuse(config.run_dir, trace.spec),
        replay_tokens=min(REPLAY_TOKENS, config.replay_tokens),
        provenance=read_provenance(config.run_dir),
    )
    path = page.write(config.run_dir / FOLDER)
    sys.stderr.write(f"report: {path}\n")
    return page, path


def load_reuse(run_dir: Path, spec: ModelSpec) -> list[Predictor]:
    """Return the run's predictors for eviction."""
    entries = [run_dir / "entries" / kind for kind in REUSE_PREDICTORS]
    return [load_predictor(str(entry), spec=spec) for entry in entries if entry.is_dir()]
