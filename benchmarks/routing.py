"""`python -m benchmarks routing`: every system on the published routing of a real model.

A log of few tokens shows how a cache fills rather than how it is used: all systems therefore start
with the same state of the computing tier.
"""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from benchmarks.config import RoutingConfig
from benchmarks.reports import describe_machine, print_line, write_report
from collect.config import ImportConfig, ImportSplit
from collect.importer import import_routing
from collect.traces import Trace
from configs.compose import compose_typed
from train.config import EvaluateConfig
from train.evaluate.commands import evaluate

HARDWARE, SHAPE = "rtx4090-pcie4", "qwen3-30b-a3b"
STARTS = {
    "filled": "every system starts with the first layers' experts in its cache",
    "empty": "every system starts with an empty cache",
}
"""The row of each start."""


@dataclass(frozen=True, kw_only=True)
class RoutingRow:
    """One system at one budget, from one start."""

    start: str
    system: str
    hardware: str
    budget: str
    tpot_mean_ms: float
    tpot_ms: float
    tpot_p95_ms: float
    hit_rate: float
    of_bound: float
    """Bound of the mean TPOT / the mean TPOT."""
    knows_future: bool


def run_routing(config: RoutingConfig) -> dict[str, Any]:
    """Import the log, all of it held out, and replay every system that needs only routing.

    Raises:
        RoutingLogError: the log is not a routing log.
    """
    machine = describe_machine()
    with tempfile.TemporaryDirectory(prefix="moecast-routing-") as scratch:
        trace = import_routing(
            config.log,
            Path(scratch) / "trace",
            ImportConfig(
                model_id=config.model_id,
                num_experts=config.num_experts,
                split=ImportSplit.HELD_OUT,
                origin=config.origin,
            ),
        )
        run_dir = config.run_dir or Path(scratch) / "run"
        rows: list[RoutingRow] = []
        for start, description in STARTS.items():
            print_line(description)
            composed = compose_comparison(config, trace, run_dir, start)
            rows += make_rows(evaluate(composed), start)
        spec = trace.spec
        write_report(
            config,
            # The machine that replayed; the simulated ones are those of the rows.
            machine=machine,
            log=config.log.name,
            shape=SHAPE,
            log_origin=config.origin,
            num_layers=spec.num_layers,
            num_experts=spec.num_experts,
            top_k=spec.top_k,
            num_requests=len(trace.request_table),
            num_tokens=len(trace.rows("held_out")),
            rows=rows,
        )
    return {"rows": len(rows), "output": str(config.output)}


def compose_comparison(
    config: RoutingConfig, trace: Trace, run_dir: Path, start: str
) -> EvaluateConfig:
    """Compose the options of `evaluate`, with the same start for all systems."""
    options = [
        f"budget={','.join(config.budget)}",
        f"hardware={HARDWARE}",
        f"shape={SHAPE}",
        *([] if config.workers is None else [f"workers={config.workers}"]),
        *([f"system={','.join(config.system)}"] if config.system else []),
        "batch_size=1",
        "figures=false",
    ]
    composed = compose_typed(EvaluateConfig, options)[0]
    filled = start == "filled"
    return replace(
        composed,
        trace=str(trace.path),
        run_dir=run_dir,
        system=[replace(system, fill_first_layers=filled) for system in composed.system],
        baseline=replace(composed.baseline, fill_first_layers=filled),
    )


def make_rows(results: Mapping[str, Any], start: str) -> list[RoutingRow]:
    """Make the rows of one start from what `evaluate` returns."""
    own = {field.name for field in fields(RoutingRow)}
    return [
        RoutingRow(
            start=start,
            knows_future=row["system"] in results["knows_future"],
            **{key: value for key, value in row.items() if key in own},
        )
        for row in results["rows"]
    ]
