"""`python -m train`: the steps of the pipeline in order, and what is told on the way."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.loggers import Logger
from rich.console import Console

from collect.launch.config import LauncherKind
from collect.traces import Trace
from predictors.base import Predictor
from predictors.config import ALL
from predictors.files import write_json
from predictors.metrics import DEFINITIONS
from predictors.registry import KINDS, LEARNED
from train.config import TrainConfig
from train.counted import counted
from train.distributed import fit_distributed
from train.drift import LEARNERS, drift
from train.fit import FitSettings, fit, settings_for
from train.keeping import SIGNALS as KEEPER_SIGNALS
from train.keeping import keeper_for, show_keeper
from train.kinds import fitting, needed_kinds, options_of, signals_of, wanted_kinds
from train.loggers import finish, log_entries, log_report, log_summary, make_logger
from train.parity import Parity
from train.pipeline import exported, families_for, machine, write_entries
from train.ray_ddp import fit_ray_ddp
from train.replay import budget_slots
from train.report.build import make_page, write_report
from train.report.commands import keeper_of
from train.scoring import Ground, scored
from train.table import show
from train.tracing import shifted_for, trace_for


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

    The one asked for comes first in the tables, baselines below it; the published learned ones are
    trained beside a learned one, in the same pass over the trace. Interrupted, the same command
    goes on from the last complete pass and the parts of the trace that are there.
    """
    assert config.run_dir is not None
    kinds = wanted_kinds(config.predictor.kind)
    options = options_of(config.predictor)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    clock = Clock()
    signals = signals_of(kinds)
    with clock.part("trace", f"trace of {config.model.name} on {config.data.name}"):
        needed = signals_of(needed_kinds(config.predictor.kind))
        trace = trace_for(
            config,
            signals,
            needed=needed,
            launcher=config.launcher,
            logs=config.run_dir / "workers",
        )
    left_out = set(kinds) - set(fitting(kinds, trace.signals))
    if left_out:
        sys.stderr.write(f"left out, for want of signals in the trace: {sorted(left_out)}\n")
        kinds = fitting(kinds, trace.signals)
        signals = signals_of(kinds)
    shifted = None
    if config.score_shifted:
        with clock.part("shifted trace", f"trace of {config.model.name} on {config.shifted.name}"):
            shifted = shifted_for(config, signals)
    ground = Ground(
        trace=trace,
        shifted=shifted,
        system=config.system,
        hardware=(
            machine(config.hardware, config.shape, config.model),
            machine(config.other_hardware, config.shape, config.model),
        ),
        budget=config.budget,
        replay_tokens=config.replay_tokens,
    )
    # Before the training, so that a budget that cannot work is told at once.
    for hardware in ground.hardware:
        budget_slots(config.budget, trace.spec, hardware)
    settings = settings_for(config, tuple(kind for kind in LEARNED if kind in kinds))
    logger = make_logger(
        config.logger,
        run_dir=config.run_dir,
        settings={"model": config.model.name, "trace": trace.digest, **asdict(settings)},
    )
    status = "failed"
    try:
        learned, agreement, training = learn(config, trace, settings, logger, clock)
        with clock.part("baselines", "counting the baselines"):
            made = counted(trace, config.model, kinds, options=options, seed=config.seed)
            everything = ordered({**learned, **made}, config.predictor.kind)
        results: dict[str, dict[str, Any]] = {}
        for name, predictor in everything.items():
            with clock.part(f"score {name}", f"scoring {name} on held-out requests"):
                results[name] = scored(predictor, ground)
        drifts: dict[str, Any] = {}
        for name, predictor in everything.items():
            if config.drift and isinstance(predictor, LEARNERS):
                with clock.part(f"drift {name}", f"serving {name} from nothing, and elsewhere"):
                    drifts[name] = drift(predictor, trace, shifted)
        setting = ground.setting
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
    reuse_predictor = None
    if config.predictor.kind == ALL and set(KEEPER_SIGNALS) <= set(trace.signals):
        with clock.part("reuse", "reuse, for eviction"):
            reuse_predictor = keeper_for(config, trace)
        entries["reuse"] = Path(reuse_predictor["entry"])
        show_keeper(reuse_predictor)
    record = {
        "model": trace.spec.as_dict(),
        "predictor": config.predictor.kind,
        "trace": {
            "path": str(trace.path.resolve()) if trace.where == str(trace.path) else trace.where,
            "digest": trace.digest,
            "tokens": trace.num_tokens,
            "held_out_tokens": len(trace.rows("held_out")),
        },
        "definitions": DEFINITIONS,
        "setting": setting,
        "predictors": results,
        "parity": {kind: asdict(one) for kind, one in agreement.items()},
        "drift": drifts if config.drift else None,
        "training": training,
        "keeping": reuse_predictor,
        "entries": {name: str(folder) for name, folder in entries.items()},
        "seconds": clock.seconds,
    }
    # Before the report: whatever befalls the drawing, the training is done and told.
    write_json(config.run_dir / "results.json", record)
    again = f"python -m train report run_dir={config.run_dir} makes it again"
    with clock.part("report", f"results.json is written; drawing the report ({again})"):
        page = make_page(record, trace, reuse_predictor=keeper_of(config.run_dir, trace.spec))
        log_report(config.logger, page, write_report(page, config.run_dir), config.run_dir)
    return record


def learn(
    config: TrainConfig, trace: Trace, settings: FitSettings, logger: Logger, clock: Clock
) -> tuple[dict[str, Predictor], dict[str, Parity], dict[str, Any] | None]:
    """The learned predictors, how well they agree with torch, and what it took.

    Nothing and null where no learned kind is asked for.
    """
    assert config.run_dir is not None
    if not settings.kinds:
        return {}, {}, None
    families = families_for(trace, config.model, settings, settings.kinds)
    networks = sum(len(family.labels) for family in families)
    told = f"training {networks} networks on {len(trace.rows('train')):,} tokens"
    with clock.part("training", told):
        if config.launcher.kind is LauncherKind.RAY and config.devices > 1:
            fitted = fit_ray_ddp(
                trace,
                config.model,
                families,
                settings,
                launcher=config.launcher,
                run_dir=config.run_dir,
                fresh=config.fresh,
            )
        elif config.launcher.is_in_process:
            fitted = fit(
                trace,
                families,
                settings,
                run_dir=config.run_dir,
                logger=logger,
                fresh=config.fresh,
            )
        else:
            fitted = fit_distributed(
                trace,
                config.model,
                families,
                settings,
                launcher=config.launcher,
                run_dir=config.run_dir,
                logger=logger,
                console=Console(stderr=True),
                fresh=config.fresh,
            )
    with clock.part("export", "exporting to ONNX and comparing with torch"):
        learned, agreement = exported(fitted.families, trace, int8=config.predictor.int8)
    return learned, agreement, fitted.record(settings)


def ordered(predictors: dict[str, Predictor], first: str) -> dict[str, Predictor]:
    """The one asked for, then the registry's order, variants behind their kind."""
    rank = {kind: place for place, kind in enumerate(KINDS)}
    names = sorted(predictors, key=lambda name: (rank[predictors[name].kind], name))
    return {name: predictors[name] for name in sorted(names, key=lambda name: name != first)}
