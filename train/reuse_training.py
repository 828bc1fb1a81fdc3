"""Trains `reuse`, the predictor behind eviction, and compares it with every eviction policy."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.loggers import Logger
from rich.console import Console

from collect.traces import Trace, TraceSignal
from predictors.reuse import ReusePredictor
from runtime.sim.hardware import Hardware
from train.config import TrainConfig
from train.disk_space import require_training_space
from train.eviction_eval import BUDGETS, DEFINITION, HitRates, compare_policies, gap_table
from train.export import quantise
from train.find_trace import find_trace
from train.fit import Fitted, fit, make_settings
from train.replay import describe_machines
from train.reuse import KIND, WIDTH, ReuseData, ReuseStack
from train.routers import RouterWeights
from train.tracking.figures import GROUP
from train.tracking.run import TrackedRun
from train.tracking.settings import resolved_settings
from zoo.entry import write_entry
from zoo.manifest import name_entry

CHECKPOINTS = "checkpoints/reuse"
SIGNALS = (TraceSignal.GATE_INPUT, TraceSignal.EXPERTS)


@dataclass(frozen=True, kw_only=True)
class TrainedReuse:
    """A trained reuse predictor, its hit rates and its zoo entry."""

    hit_rates: Mapping[str, Mapping[str, Mapping[str, HitRates]]]
    training: dict[str, Any]
    entry: Path

    def as_dict(self) -> dict[str, Any]:
        return {
            "definition": DEFINITION,
            "hit_rates": tables_dict(self.hit_rates),
            "training": self.training,
            "entry": str(self.entry),
        }

    def show(self) -> None:
        """Print the table of hit rates."""
        console = Console()
        console.print(DEFINITION, highlight=False)
        gap_table(self.hit_rates).print(console)


def train_and_publish(
    config: TrainConfig,
    trace: Trace,
    routers: RouterWeights,
    hardware: Hardware,
    tracked: TrackedRun,
) -> TrainedReuse:
    """Train the predictor on a trace, compare it with other policies and write its entry.

    Its curves are `reuse-NAME` in the run's loggers.
    """
    assert config.run_dir is not None
    sys.stderr.write(f"training reuse on {len(trace.rows('train')):,} tokens\n")
    loggers = tracked.loggers(KIND)
    predictor, fitted = fit_reuse(config, trace, routers, run_dir=config.run_dir, loggers=loggers)
    sys.stderr.write("replaying held-out requests under every eviction policy\n")
    tables = compare_policies(trace, predictor, hardware, num_tokens=config.replay_tokens)
    entry = config.run_dir / "entries" / KIND
    held_out = publish_reuse(entry, predictor, tables, trace, model_name=config.model.name)
    tracked.log_summary({f"{GROUP}/{KIND}/{name}": rate for name, rate in held_out.items()})
    training = fitted.record(make_settings(config, (KIND,), width=WIDTH))
    return TrainedReuse(hit_rates=tables, training=training, entry=entry)


def fit_reuse(
    config: TrainConfig,
    trace: Trace,
    routers: RouterWeights,
    *,
    run_dir: Path,
    loggers: Sequence[Logger],
) -> tuple[ReusePredictor, Fitted]:
    """Train on the training requests, one after another as a server runs them.

    The weights are those of the best epoch on requests set aside. Resumes from the run folder's
    checkpoint.
    """
    matrices_LED, biases_LE = routers.matrices_LED, routers.biases_LE
    if biases_LE is None:
        biases_LE = np.zeros(matrices_LED.shape[:2], np.float32)
    settings = make_settings(config, (KIND,), width=WIDTH)
    seed_everything(config.seed, verbose=False)
    stack = ReuseStack(trace.spec, matrices_LED, biases_LE)
    require_training_space(run_dir, [stack])
    data = ReuseData(trace, matrices_LED, biases_LE, batch_size=config.batch_size, seed=config.seed)
    fitted = fit(
        trace,
        [stack],
        settings,
        run_dir=run_dir,
        loggers=loggers,
        overwrite=config.overwrite,
        data=data,
        checkpoints=CHECKPOINTS,
    )
    predictor = stack.export(trace.spec)[KIND]
    if config.predictor.int8:
        predictor = quantise(predictor)
    assert isinstance(predictor, ReusePredictor)
    return predictor, fitted


def publish_reuse(
    folder: Path,
    predictor: ReusePredictor,
    tables: Mapping[str, Mapping[str, Mapping[str, HitRates]]],
    trace: Trace,
    *,
    model_name: str,
) -> dict[str, float]:
    """Write the zoo entry with the hit rates as its metrics; return those that were measured."""
    held_out: dict[str, float | None] = {}
    for budget in BUDGETS:
        rates = tables["generated, per-layer"][budget][KIND]
        percent = budget.rstrip("%")
        held_out[f"hit_rate_{percent}"] = rates.decode
        held_out[f"gap_closed_{percent}"] = rates.decode_gap_closed
    write_entry(
        folder,
        name=name_entry(model_name, KIND),
        kind=KIND,
        options={},
        spec=trace.spec,
        signals=ReusePredictor.signals,
        files=predictor.files(),
        metrics={
            "held_out": held_out,
            "definitions": {"hit_rate": DEFINITION},
            "tables": tables_dict(tables),
        },
        trace_digest=trace.digest,
        parity={},
        card_extra=f"{DEFINITION}; generated tokens, an arena for each layer.",
    )
    return {name: rate for name, rate in held_out.items() if rate is not None}


def tables_dict(tables: Mapping[str, Mapping[str, Mapping[str, HitRates]]]) -> dict[str, Any]:
    return {
        stream: {
            budget: {policy: asdict(rates) for policy, rates in policies.items()}
            for budget, policies in budgets.items()
        }
        for stream, budgets in tables.items()
    }


def train_reuse(config: TrainConfig) -> dict[str, Any]:
    """Run `moecast train reuse` and return what results.json holds."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    trace = find_trace(config, SIGNALS, needed=SIGNALS)
    (hardware,) = describe_machines([config.hardware], config.shape, config.model)
    routers = RouterWeights(config.model, trace.spec)
    with TrackedRun(config) as tracked:
        tracked.start(resolved_settings(config, trace, [hardware]), trace)
        trained = train_and_publish(config, trace, routers, hardware, tracked)
        tracked.log_entries({KIND: trained.entry})
    trained.show()
    return {
        "model": trace.spec.as_dict(),
        "trace": {"digest": trace.digest, "tokens": trace.num_tokens},
        **trained.as_dict(),
        "entries": {KIND: str(trained.entry)},
    }
