"""`python -m train report run_dir=RUN`: the page of a run that is over, made again."""

import json
from pathlib import Path
from typing import Any

from collect.traces import Trace
from predictors.base import Predictor
from predictors.spec import ModelSpec
from train.errors import TrainError
from train.report.build import make_page, write_report
from train.report.config import ReportConfig
from zoo.load import load_predictor

REUSE = "reuse"


def report(config: ReportConfig) -> dict[str, Any]:
    """Draws the report from the run's results.json and its trace; returns where it is.

    Raises:
        TrainError: not a training run's folder, or results, trace and ceiling do not belong
            together.
    """
    if config.run_dir is None:
        raise TrainError("which run? run_dir=RUN, the folder of a finished `python -m train`")
    results = read_results(config.run_dir)
    ceiling = None
    if config.ceiling is not None:
        ceiling = read_ceiling(config.ceiling, results["trace"]["digest"])
    trace = open_run_trace(results, config.trace)
    page = make_page(
        results,
        trace,
        reuse_predictor=load_reuse(config.run_dir, trace.spec),
        ceiling=ceiling,
        replay_tokens=config.replay_tokens,
    )
    return {"report": str(write_report(page, config.run_dir))}


def read_results(run_dir: Path) -> dict[str, Any]:
    path = run_dir / "results.json"
    if not path.is_file():
        raise TrainError(
            f"{path} is missing: run_dir must be the folder of a finished `python -m train`"
        )
    results = json.loads(path.read_text())
    if "predictors" not in results or "trace" not in results:
        raise TrainError(f"{path} is not of `python -m train`: it has no table of predictors")
    return results


def open_run_trace(results: dict[str, Any], path: str | None) -> Trace:
    """The trace that the results were measured on."""
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


def read_ceiling(path: Path, digest: str) -> dict[str, Any]:
    """Read the results of `benchmarks/ceiling.py` on the same trace."""
    if not path.is_file():
        raise TrainError(f"ceiling={path} is missing: `python -m benchmarks ceiling` writes it")
    found = json.loads(path.read_text())
    if found.get("trace") != digest:
        raise TrainError(
            f"ceiling={path} is of the trace {str(found.get('trace'))[:12]}, the run of "
            f"{digest[:12]}: measure this one with `python -m benchmarks ceiling`, or "
            "leave ceiling out"
        )
    return found


def load_reuse(run_dir: Path, spec: ModelSpec) -> Predictor | None:
    """Return the reuse predictor that the run trained, None if there is none."""
    entry = run_dir / "entries" / REUSE
    return load_predictor(str(entry), spec=spec) if entry.is_dir() else None
