"""`python -m train`: the steps of the pipeline in order, and what is told on the way."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch

from predictors.base import Predictor
from predictors.metrics import DEFINITIONS
from predictors.registry import KINDS, LEARNED, predictor_class
from train.config import TrainConfig
from train.fit import FitSettings, Fitted, digest_of, fit
from train.loggers import finish, log_entries, log_summary, make_logger
from train.networks import edges
from train.pipeline import baselines, exported, machine, scored, write_entries
from train.replay import budget_slots
from train.table import show
from train.tracing import trace_for


class Clock:
    """Says what begins, and keeps what each part took, in seconds."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str, told: str) -> Iterator[None]:
        sys.stderr.write(f"{told}\n")
        started = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - started, 3)


def train(config: TrainConfig) -> dict[str, Any]:
    """From a model's name to scored predictors in zoo entries; returns what results.json holds.

    Both learned predictors are trained whichever is asked for: one stack, hardly more work. The
    one asked for comes first in the tables. Interrupted, the same command goes on from the last
    complete pass and the parts of the trace that are there.
    """
    assert config.run_dir is not None
    wanted = predictor_class(config.predictor.kind).kind
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    clock = Clock()
    with clock.part("trace", f"trace of {config.model.name} on {config.data.name}"):
        trace = trace_for(config)
    # Before the training, so that a budget that cannot work is told at once.
    hardware = machine(config.hardware, config.model)
    slots = budget_slots(config.budget, trace.spec, hardware)
    settings = fit_settings(config)
    logger = make_logger(
        config.logger,
        run_dir=config.run_dir,
        settings={"model": config.model.name, "trace": trace.digest, **asdict(settings)},
    )
    status = "failed"
    try:
        networks = edges(trace.spec, settings.kinds)
        told = f"training {len(networks)} networks on {len(trace.rows('train')):,} tokens"
        with clock.part("training", told):
            fitted = fit(
                trace,
                networks,
                settings,
                run_dir=config.run_dir,
                logger=logger,
                fresh=config.fresh,
            )
        with clock.part("export", "exporting to ONNX and comparing with torch"):
            learned, agreement = exported(fitted, trace)
        with clock.part("baselines", "counting the baselines"):
            everything = ordered({**learned, **baselines(trace, config.model)}, wanted)
        results: dict[str, dict[str, Any]] = {}
        for name, predictor in everything.items():
            with clock.part(f"score {name}", f"scoring {name} on held-out requests"):
                results[name] = scored(
                    predictor,
                    trace,
                    system=config.system,
                    hardware=hardware,
                    slots=slots,
                    replay_tokens=config.replay_tokens,
                )
        setting = (
            f"system {config.system.name}, hardware {hardware.name}, budget {config.budget}, "
            f"replay of {config.replay_tokens:,} generated held-out tokens"
        )
        entries = write_entries(
            config.run_dir / "entries",
            everything,
            results,
            agreement,
            trace,
            model_name=config.model.name,
            setting=setting,
        )
        show(results, setting=setting)
        log_summary(logger, results)
        log_entries(logger, entries, {"model": config.model.name, "trace": trace.digest})
        sys.stderr.write(f"zoo entries: {config.run_dir / 'entries'} ({', '.join(entries)})\n")
        status = "success"
    finally:
        finish(logger, status)
    return {
        "model": trace.spec.as_dict(),
        "predictor": wanted,
        "trace": {
            "digest": trace.digest,
            "tokens": trace.num_tokens,
            "held_out_tokens": len(trace.rows("held_out")),
        },
        "definitions": DEFINITIONS,
        "setting": setting,
        "predictors": results,
        "parity": {kind: asdict(one) for kind, one in agreement.items()},
        "training": training_record(fitted, settings),
        "entries": {name: str(folder) for name, folder in entries.items()},
        "seconds": clock.seconds,
    }


def fit_settings(config: TrainConfig) -> FitSettings:
    return FitSettings(
        kinds=tuple(LEARNED),
        width=config.predictor.width,
        loss=config.loss.value,
        max_epochs=config.max_epochs,
        batch_size=config.batch_size,
        lr=config.lr,
        weight_decay=config.weight_decay,
        seed=config.seed,
    )


def training_record(fitted: Fitted, settings: FitSettings) -> dict[str, Any]:
    return {
        **asdict(settings),
        "networks": len(fitted.edges),
        "parameters": sum(one.numel() for one in fitted.stack.parameters()),
        "steps": fitted.steps,
        "seconds": round(fitted.seconds, 3),
        "resumed": fitted.resumed,
        "weights_digest": digest_of(fitted.stack),
    }


def ordered(predictors: dict[str, Predictor], first: str) -> dict[str, Predictor]:
    """The one asked for, then the registry's order, variants behind their kind."""
    rank = {kind: place for place, kind in enumerate(KINDS)}
    names = sorted(predictors, key=lambda name: (rank[predictors[name].kind], name))
    return {name: predictors[name] for name in sorted(names, key=lambda name: name != first)}
