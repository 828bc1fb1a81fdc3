"""`moecast train`: the stages of the pipeline in order."""

import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch.loggers import Logger

from collect.config import LauncherKind
from collect.traces import Trace
from predictors.base import Predictor
from predictors.config import ALL
from predictors.files import write_json
from predictors.metrics import DEFINITIONS
from predictors.registry import KINDS, LEARNED
from runtime.presets import describe_choice
from runtime.tools.report.html_report import FILE
from runtime.tools.report.provenance import describe_origin
from train.checkpoint import require_training_space
from train.config import TrainConfig
from train.data import hold_out_unlearned, require_requests
from train.errors import TrainError
from train.find_trace import find_trace
from train.fit import CHECKPOINTS, Training, make_settings
from train.kinds import (
    BASELINES,
    WITH_REUSE,
    collect_signals,
    leave_out_kinds,
    list_compared_kinds,
    options_by_kind,
)
from train.nonlearned import RouterWeights, count_baselines
from train.pipeline import (
    export_predictors,
    make_stacks,
    open_published,
    read_finished,
    write_entries,
)
from train.ray_ddp import fit_ray_ddp
from train.record_training import record_training
from train.replay import budget_slots, describe_machines
from train.report.build import FOLDER, draw_report, show
from train.reuse import KIND as REUSE
from train.reuse_training import SIGNALS as REUSE_SIGNALS
from train.reuse_training import train_and_publish
from train.scoring import EvalContext, score_predictor
from train.tracking.run import TrackedRun, summary_figures
from zoo.load import load_entry
from zoo.manifest import Scalar


class StageTimer:
    """Announces the stages of the pipeline and keeps their times in seconds."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str, message: str) -> Iterator[None]:
        """Print the message and time what runs inside."""
        sys.stderr.write(f"{message}\n")
        started = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - started, 3)


def train(config: TrainConfig) -> dict[str, Any]:
    """Run `moecast train` in the tracking run of its folder; return what results.json holds."""
    with TrackedRun(config) as tracked:
        return run_pipeline(config, tracked)


def run_pipeline(config: TrainConfig, tracked: TrackedRun) -> dict[str, Any]:
    """Train, score and publish the predictors of a model, and return what results.json holds.

    The configured predictor comes first in the tables, baselines below it. The published learned
    predictors are trained together with a learned one, on the same batches. An interrupted command
    resumes from the last complete epoch and the recorded parts of the trace.
    """
    kinds = list_compared_kinds(config.predictor.kind)
    options = options_by_kind(config.predictor)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    timer = StageTimer()
    signals = collect_signals(kinds)
    find = partial(find_trace, launcher=config.launcher, logs=config.folder / "workers")
    source = config.trace or config.data.name
    with timer.stage("trace", f"trace of {config.model.name}: {source}"):
        selected = config.predictor.kind
        # A trace that was named may lack what baselines need.
        needed = collect_signals(
            kind for kind in kinds if selected in (ALL, kind) or kind not in BASELINES
        )
        trace = find(config, signals, needed=needed)
    if (finished := read_finished(config, trace)) is not None:
        # The page is written last.
        if config.figures and not (config.folder / FOLDER / FILE).is_file():
            draw_report(finished, trace, config)
        return finished
    left_out = leave_out_kinds(config.predictor, kinds, trace)
    for kind, reason in left_out.items():
        sys.stderr.write(f"left out: {kind}: {reason}\n")
    kinds = tuple(kind for kind in kinds if kind not in left_out)
    signals = collect_signals(kinds)

    def find_other(other: TrainConfig, key: str) -> Trace:
        return hold_out_unlearned(find(other, signals, key=key), trace, key=key)

    shifted = None
    if config.score_shifted:
        with timer.stage("shifted trace", f"trace of {config.model.name} on {config.shifted.name}"):
            other = replace(config, data=config.shifted, trace=config.shifted_trace)
            shifted = find_other(other, "shifted_trace")
    others = {
        kind: find_other(replace(config, trace=where), f"other_kinds.{kind}")
        for kind, where in config.other_kinds.items()
    }
    configs = [config.hardware, config.other_hardware]
    machines = describe_machines(configs, config.shape, config.model)
    context = EvalContext(
        trace=trace, shifted=shifted, others=others, hardware=machines, config=config
    )
    # Before the training, so that a budget that cannot work is refused at once.
    for hardware in machines:
        budget_slots(config.budget, trace.spec, hardware)
    tracked.start(trace, machines)
    published = open_published(config, trace)
    scores_reuse = config.zoo is None or published.pop(REUSE, None) is not None
    if config.zoo is not None and not published:
        raise TrainError(
            f"zoo={config.zoo} has only {REUSE} of model={config.model.name}, which is scored by "
            f"`moecast zoo score {config.model.name}/{REUSE}`"
        )
    training, records = None, {name: entry.training() for name, entry in published.items()}
    if config.zoo is None:
        routers = RouterWeights(config.model, trace.spec)
        learned, parities, training = train_networks(
            config, trace, routers, kinds, tracked.loggers(), timer
        )
        with timer.stage("baselines", "counting the baselines"):
            baselines = count_baselines(trace, routers, kinds, options=options, seed=config.seed)
        predictors = {**learned, **baselines}
        records |= dict.fromkeys(predictors, record_training(config, trace))
    else:
        predictors = {name: load_entry(entry, spec=trace.spec) for name, entry in published.items()}
        parities = {name: entry.manifest.parity for name, entry in published.items()}
    predictors = order_predictors(predictors, config.predictor.kind)
    results: dict[str, dict[str, Any]] = {}
    for name, predictor in predictors.items():
        with timer.stage(f"score {name}", f"scoring {name} on held-out requests"):
            results[name] = score_predictor(predictor, context)
    entries = write_entries(config, context, predictors, results, parities, records)
    show(results, setting=context.setting)
    tracked.log_summary(summary_figures(results))
    tracked.log_entries(entries)
    sys.stderr.write(f"zoo entries: {config.folder / 'entries'} ({', '.join(entries)})\n")
    reuse = None
    if (
        scores_reuse
        and config.predictor.kind in WITH_REUSE
        and set(REUSE_SIGNALS) <= set(trace.signals)
    ):
        with timer.stage("reuse", "reuse, for eviction"):
            reuse = train_and_publish(config, trace, tracked)
    record = {
        "origin": describe_origin(config.folder),
        "model": trace.spec.as_dict(),
        "predictor": config.predictor.kind,
        "trace": {
            "path": str(trace.path.resolve()) if trace.where == str(trace.path) else trace.where,
            "digest": trace.digest,
            "tokens": trace.num_tokens,
            "held_out_tokens": len(trace.rows("held_out")),
        },
        "definitions": DEFINITIONS,
        "setting": context.setting,
        "predictors": results,
        "parity": {kind: parity for kind, parity in parities.items() if parity},
        "training": training,
        "keeping": reuse,
        "entries": {
            **{name: str(folder) for name, folder in entries.items()},
            **(reuse["entries"] if reuse else {}),
        },
        "seconds": timer.seconds,
    }
    # Before the report, so that a failed drawing loses no results.
    write_json(config.folder / "results.json", record)
    if config.figures:
        with timer.stage("report", "results.json is written; drawing the report"):
            tracked.log_report(*draw_report(record, trace, config))
    model, kind = describe_choice(config.model), config.predictor.kind
    # Entries of one kind may have several names: skip, skip-2.
    named = (entries[name] for name, predictor in predictors.items() if predictor.kind == kind)
    own = config.folder if kind in WITH_REUSE else next(named, config.folder)
    push = shlex.join(["moecast", "zoo", "push", str(config.folder)])
    sys.stderr.write(
        f"next: `{push}` adds the entries to your zoo, from which every command with this model "
        f"takes them; `moecast chat {model} {shlex.quote(f'predictor={own}')}` uses them without\n"
    )
    return record


def train_networks(
    config: TrainConfig,
    trace: Trace,
    routers: RouterWeights,
    kinds: Sequence[str],
    loggers: Sequence[Logger],
    timer: StageTimer,
) -> tuple[dict[str, Predictor], dict[str, dict[str, Scalar]], dict[str, Any] | None]:
    """Return the learned predictors, their agreement with torch and the record of the training.

    They are empty, and the record is None, where no learned kind is among `kinds`.
    """
    settings = make_settings(config, tuple(kind for kind in LEARNED if kind in kinds))
    if not settings.kinds:
        return {}, {}, None
    require_requests(trace)
    families = make_stacks(trace, routers, settings)
    require_training_space(config.folder, families)
    training = Training(trace, families, settings, config.folder / CHECKPOINTS)
    networks = sum(len(family.labels) for family in families)
    message = f"training {networks} networks on {len(trace.rows('train')):,} tokens"
    with timer.stage("training", message):
        if config.launcher.kind is LauncherKind.RAY and config.devices > 1:
            fitted = fit_ray_ddp(training, config, loggers)
        else:
            fitted = training.fit(loggers, overwrite=config.overwrite)
    with timer.stage("export", "exporting to ONNX and comparing with torch"):
        learned, parities = export_predictors(fitted.families, trace, int8=config.predictor.int8)
    return learned, parities, fitted.record(settings)


def order_predictors(predictors: dict[str, Predictor], first: str) -> dict[str, Predictor]:
    """Return `first`, then the others in the registry's order, variants after their kind."""
    rank = list(KINDS).index
    names = sorted(predictors, key=lambda name: (name != first, rank(predictors[name].kind), name))
    return {name: predictors[name] for name in names}
