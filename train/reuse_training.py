"""Trains the predictor behind `reuse` eviction, and compares it with every eviction policy."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.loggers import Logger
from rich.console import Console

from collect.config import LauncherKind
from collect.traces import Trace, TraceSignal
from predictors.base import Predictor
from train.checkpoint import require_training_space
from train.config import TrainConfig
from train.data import require_requests
from train.eviction_eval import DEFINITION, PER_LAYER, compare_policies, decode_figures, gap_table
from train.export import quantise
from train.find_trace import find_trace
from train.fit import CHECKPOINTS, FitSettings, Fitted, Training, make_settings
from train.pipeline import open_published, read_finished
from train.record_training import record_training
from train.report.serving import draw_reuse_figure
from train.reuse import KIND, WIDTH, ReuseStack
from train.tracking.run import GROUP, TrackedRun
from zoo.entry import write_entry
from zoo.load import load_entry
from zoo.manifest import name_entry

SIGNALS = (TraceSignal.GATE_INPUT, TraceSignal.GATE_LOGITS, TraceSignal.EXPERTS)


def train_and_publish(config: TrainConfig, trace: Trace, tracked: TrackedRun) -> dict[str, Any]:
    """Train the predictor or take it from `zoo`, compare it with other policies, write its entry.

    Its curves are `reuse-NAME` in the run's loggers. The table of hit rates is printed and, with
    the training and the entry, returned for results.json.
    """
    training: dict[str, Any] = {}
    if config.zoo is None:
        sys.stderr.write(f"training {KIND} on {len(trace.rows('train')):,} tokens\n")
        predictor, fitted = fit_reuse(config, trace, loggers=tracked.loggers(KIND))
        record: dict[str, Any] | None = record_training(config, trace)
        training[KIND] = fitted.record(reuse_settings(config))
    else:
        entry = open_published(config, trace, KIND)[KIND]
        predictor, record = load_entry(entry, spec=trace.spec), entry.training()
    sys.stderr.write("replaying held-out requests under every eviction policy\n")
    tables = compare_policies(trace, [predictor], num_tokens=config.replay_tokens)
    folder, held_out = config.folder / "entries" / KIND, decode_figures(tables, KIND)
    write_entry(
        folder,
        predictor,
        name=name_entry(config.model.name, KIND),
        metrics={"held_out": held_out, "definitions": {"hit_rate": DEFINITION}, "tables": tables},
        trace_digest=trace.digest,
        card_extra=f"{DEFINITION}; generated tokens, an arena for each layer.",
        training=record,
        figure=draw_reuse_figure(tables[PER_LAYER]) if config.figures else None,
    )
    measured = {f"{GROUP}/{KIND}/{name}": rate for name, rate in held_out.items()}
    tracked.log_summary({name: rate for name, rate in measured.items() if rate is not None})
    tracked.log_entries({KIND: folder})
    console = Console()
    console.print(DEFINITION, highlight=False)
    gap_table(tables).print(console)
    return {
        "definition": DEFINITION,
        "hit_rates": tables,
        "training": training,
        "entries": {KIND: str(folder)},
    }


def reuse_settings(config: TrainConfig) -> FitSettings:
    """Return a run's settings for it.

    With launcher=ray it is trained on one device: Lightning would run the whole command once more
    for each other device, and each of these commands would train everything with Ray again.
    """
    settings = replace(make_settings(config, (KIND,)), width=WIDTH)
    return replace(settings, devices=1) if config.launcher.kind is LauncherKind.RAY else settings


def fit_reuse(
    config: TrainConfig, trace: Trace, *, loggers: Sequence[Logger]
) -> tuple[Predictor, Fitted]:
    """Train on the training requests, one after another as a server runs them.

    The weights are those of the best epoch on requests set aside. Resumes from the run folder's
    checkpoint.
    """
    require_requests(trace)
    seed_everything(config.seed, verbose=False)
    stack = ReuseStack(trace.spec)
    require_training_space(config.folder, [stack])
    folder = config.folder / CHECKPOINTS / KIND
    training = Training(trace, [stack], reuse_settings(config), folder)
    fitted = training.fit(loggers, overwrite=config.overwrite)
    predictor = stack.export(trace.spec)[KIND]
    return quantise(predictor) if config.predictor.int8 else predictor, fitted


def train_reuse(config: TrainConfig) -> dict[str, Any]:
    """Run `moecast train reuse` and return what results.json holds."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    trace = find_trace(config, SIGNALS)
    if (finished := read_finished(config, trace)) is not None:
        return finished
    with TrackedRun(config) as tracked:
        tracked.start(trace)
        trained = train_and_publish(config, trace, tracked)
    return {
        "model": trace.spec.as_dict(),
        "trace": {"digest": trace.digest, "tokens": trace.num_tokens},
        **trained,
    }
