"""The page of a training run, and `moecast train report run_dir=RUN`, which makes it again."""

import json
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
from train.config import ReportConfig
from train.errors import TrainError
from train.eviction_eval import rate_all_policies
from train.report import forecasts, routing, serving
from train.table import describe_summary, summary_table
from zoo.load import load_predictor

FOLDER = "report"
"""Folder of the report inside the run folder."""
REPLAY_TOKENS = 200


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


def write_report(page: HtmlReport, run_dir: Path) -> Path:
    path = page.write(run_dir / FOLDER)
    sys.stderr.write(f"report: {path}\n")
    return path


def report(config: ReportConfig) -> dict[str, Any]:
    """Draws the report from the run's results.json and its trace; returns where it is.

    Raises:
        TrainError: not a training run's folder, or results and trace do not belong together.
    """
    if config.run_dir is None:
        raise TrainError("which run? run_dir=RUN, the folder of a finished `moecast train`")
    results = read_results(config.run_dir)
    trace = open_run_trace(results, config.trace)
    page = make_page(
        results,
        trace,
        reuse_predictors=load_reuse(config.run_dir, trace.spec),
        replay_tokens=config.replay_tokens,
        provenance=read_provenance(config.run_dir),
    )
    return {"report": str(write_report(page, config.run_dir))}


def read_results(run_dir: Path) -> dict[str, Any]:
    path = run_dir / "results.json"
    if not path.is_file():
        raise TrainError(
            f"{path} is missing: run_dir must be the folder of a finished `moecast train`"
        )
    results = json.loads(path.read_text())
    if "predictors" not in results or "trace" not in results:
        raise TrainError(f"{path} is not of `moecast train`: it has no table of predictors")
    return results


def open_run_trace(results: dict[str, Any], path: str | None) -> Trace:
    known = path or results["trace"].get("path")
    if known is None:
        raise TrainError(
            "results.json does not say where its trace is: name it with trace=PATH "
            f"(digest {results['trace']['digest'][:12]})"
        )
    trace = Trace.open(known)
    if trace.digest != results["trace"]["digest"]:
        raise TrainError(
            f"trace={known} has the digest {trace.digest[:12]}, the run was trained on "
            f"{results['trace']['digest'][:12]}: name that one with trace=PATH"
        )
    return trace


def load_reuse(run_dir: Path, spec: ModelSpec) -> list[Predictor]:
    """Return the run's predictors for eviction."""
    entries = [run_dir / "entries" / kind for kind in REUSE_PREDICTORS]
    return [load_predictor(str(entry), spec=spec) for entry in entries if entry.is_dir()]
