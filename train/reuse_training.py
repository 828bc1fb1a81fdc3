"""Trains the predictors behind `reuse` eviction, and compares them with every eviction policy."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.loggers import Logger
from rich.console import Console

from collect.launch.config import LauncherKind
from collect.traces import Trace, TraceSignal
from predictors.base import Predictor
from predictors.next_use import NextUsePredictor
from predictors.reuse import ReusePredictor
from runtime.sim.hardware import Hardware
from train import next_use, reuse
from train.card_figures import draw_reuse_figure
from train.config import TrainConfig
from train.data import require_requests
from train.disk_space import require_training_space
from train.eviction_eval import BUDGETS, DEFINITION, HitRates, compare_policies, gap_table
from train.export import quantise
from train.find_trace import find_trace
from train.fit import FitSettings, Fitted, fit, make_settings
from train.kinds import leave_out_token_kinds, reuse_kinds
from train.predictor_stack import PredictorStack
from train.record_training import record_training
from train.replay import describe_machines
from train.routers import RouterWeights
from train.stretches import StretchData
from train.tracking.figures import GROUP
from train.tracking.run import TrackedRun
from train.tracking.settings import resolved_settings
from zoo.entry import write_entry
from zoo.manifest import name_entry
from zoo.training_record import TrainingRecord

CHECKPOINTS = "checkpoints"
PER_LAYER = "generated, per-layer"
"""Replay of generated tokens, each layer with its own arena."""
SIGNALS = (TraceSignal.GATE_INPUT, TraceSignal.EXPERTS)


@dataclass(frozen=True)
class ReuseNetworks:
    """The networks of a kind of predictor, and how their training data are read."""

    stack: Callable[..., PredictorStack]
    read_stretch: Callable[..., Any]
    width: int


NETWORKS: Mapping[str, ReuseNetworks] = {
    ReusePredictor.kind: ReuseNetworks(reuse.ReuseStack, reuse.read_stretch, reuse.WIDTH),
    NextUsePredictor.kind: ReuseNetworks(
        next_use.NextUseStack, next_use.read_stretch, next_use.WIDTH
    ),
}


@dataclass(frozen=True, kw_only=True)
class TrainedReuse:
    """Trained reuse predictors, their hit rates and their zoo entries, by kind."""

    hit_rates: Mapping[str, Mapping[str, Mapping[str, HitRates]]]
    training: dict[str, Any]
    entries: Mapping[str, Path]

    def as_dict(self) -> dict[str, Any]:
        return {
            "definition": DEFINITION,
            "hit_rates": tables_dict(self.hit_rates),
            "training": self.training,
            "entries": {kind: str(entry) for kind, entry in self.entries.items()},
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
    """Train the predictors on a trace, compare them with other policies and write their entries.

    The curves of a kind are `KIND-NAME` in the run's loggers.
    """
    assert config.run_dir is not None
    predictors, training = [], {}
    kinds = reuse_kinds(config.predictor.kind)
    blind = leave_out_token_kinds(config.predictor, kinds, has_tokens=trace.has_tokens)
    for kind in (kind for kind in kinds if kind not in blind):
        sys.stderr.write(f"training {kind} on {len(trace.rows('train')):,} tokens\n")
        loggers = tracked.loggers(kind)
        predictor, fitted = fit_reuse(
            kind, config, trace, routers, run_dir=config.run_dir, loggers=loggers
        )
        predictors.append(predictor)
        training[kind] = fitted.record(reuse_settings(config, kind))
    sys.stderr.write("replaying held-out requests under every eviction policy\n")
    tables = compare_policies(trace, predictors, hardware, num_tokens=config.replay_tokens)
    entries = {}
    for predictor in predictors:
        kind = predictor.kind
        entries[kind] = config.run_dir / "entries" / kind
        held_out = publish_reuse(
            entries[kind],
            predictor,
            tables,
            trace,
            model_name=config.model.name,
            training=record_training(config, trace),
            draws_figure=config.figures,
        )
        tracked.log_summary({f"{GROUP}/{kind}/{name}": rate for name, rate in held_out.items()})
    return TrainedReuse(hit_rates=tables, training=training, entries=entries)


def reuse_settings(config: TrainConfig, kind: str) -> FitSettings:
    """Return a run's settings for a kind.

    With launcher=ray it is trained on one device: Lightning would run the whole command once more
    for each other device, and each of these commands would train everything with Ray again.
    """
    settings = make_settings(config, (kind,), width=NETWORKS[kind].width)
    return replace(settings, devices=1) if config.launcher.kind is LauncherKind.RAY else settings


def fit_reuse(
    kind: str,
    config: TrainConfig,
    trace: Trace,
    routers: RouterWeights,
    *,
    run_dir: Path,
    loggers: Sequence[Logger],
) -> tuple[Predictor, Fitted]:
    """Train on the training requests, one after another as a server runs them.

    The weights are those of the best epoch on requests set aside. Resumes from the run folder's
    checkpoint.
    """
    require_requests(trace)
    networks = NETWORKS[kind]
    matrices_LED, biases_LE = routers.matrices_LED, routers.biases_LE
    if biases_LE is None:
        biases_LE = np.zeros(matrices_LED.shape[:2], np.float32)
    settings = reuse_settings(config, kind)
    seed_everything(config.seed, verbose=False)
    stack = networks.stack(trace.spec, matrices_LED, biases_LE)
    require_training_space(run_dir, [stack])
    read = partial(networks.read_stretch, trace, routers_LED=matrices_LED, biases_LE=biases_LE)
    data = StretchData(trace, read, batch_size=config.batch_size, seed=config.seed)
    fitted = fit(
        trace,
        [stack],
        settings,
        run_dir=run_dir,
        loggers=loggers,
        overwrite=config.overwrite,
        data=data,
        checkpoints=f"{CHECKPOINTS}/{kind}",
    )
    predictor = stack.export(trace.spec)[kind]
    return quantise(predictor) if config.predictor.int8 else predictor, fitted


def publish_reuse(
    folder: Path,
    predictor: Predictor,
    tables: Mapping[str, Mapping[str, Mapping[str, HitRates]]],
    trace: Trace,
    *,
    model_name: str,
    training: TrainingRecord,
    draws_figure: bool = True,
) -> dict[str, float]:
    """Write the zoo entry with the hit rates as its metrics; return those that were measured."""
    held_out: dict[str, float | None] = {}
    for budget in BUDGETS:
        rates = tables[PER_LAYER][budget][predictor.kind]
        percent = budget.rstrip("%")
        held_out[f"hit_rate_{percent}"] = rates.decode
        held_out[f"gap_closed_{percent}"] = rates.decode_gap_closed
    write_entry(
        folder,
        name=name_entry(model_name, predictor.kind),
        kind=predictor.kind,
        options={},
        spec=trace.spec,
        signals=predictor.signals,
        files=predictor.files(),
        metrics={
            "held_out": held_out,
            "definitions": {"hit_rate": DEFINITION},
            "tables": tables_dict(tables),
        },
        trace_digest=trace.digest,
        parity={},
        card_extra=f"{DEFINITION}; generated tokens, an arena for each layer.",
        training=training,
        figure=draw_reuse_figure(tables[PER_LAYER]) if draws_figure else None,
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
        tracked.log_entries(trained.entries)
    trained.show()
    return {
        "model": trace.spec.as_dict(),
        "trace": {"digest": trace.digest, "tokens": trace.num_tokens},
        **trained.as_dict(),
    }
