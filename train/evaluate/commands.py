"""`moecast evaluate`: opens the inputs, replays every system and compares them."""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console

from collect.traces import Trace
from collect.traces.layout import ALL_SIGNALS
from predictors.errors import MoecastError
from predictors.registry import separate_run
from runtime.commands.progress import progress
from runtime.config import HardwareConfig, ModelConfig, ShapeConfig
from runtime.errors import CheckpointError
from runtime.sim.hardware import Hardware
from train.config import EvaluateConfig
from train.errors import TrainError
from train.evaluate.forecasts import held_out_steps
from train.evaluate.jobs import ReplayJob, Row, code_digest
from train.evaluate.report import write_report
from train.evaluate.results import make_results
from train.evaluate.table import show
from train.evaluate.variants import (
    PredictorSources,
    ReplayCase,
    figure_condition,
    list_cases,
    list_variants,
)
from train.find_trace import find_differences, find_trace, open_named_trace
from train.replay import budget_slots, describe_machines
from train.resumable import FinishedPieces, run_jobs


def evaluate(config: EvaluateConfig) -> dict[str, Any]:
    """Replay every system in every condition and return what results.json holds.

    A trace that was named is opened, of whatever model; the model's own is recorded if it is
    missing. An interrupted command resumes when it is given the same run_dir: a finished replay is
    a file there, named by the digest of everything that decides its figures.

    Raises:
        TrainError: the named trace is not there or incomplete.
        TraceError: it is damaged, or not finished.
        PromptError, DiskFullError, CheckpointError: it cannot be recorded.
    """
    started = time.perf_counter()
    predictor, entries = separate_run(config.predictor, config.entries)
    config = replace(config, predictor=predictor, entries=entries)
    if config.trace is None:
        trace = find_trace(config, ALL_SIGNALS)
    else:
        # Of any model.
        trace = open_named_trace(config.trace, config.model)
    model = find_traced_model(trace, config.model)
    machines = list_machines(config.hardware, config.shape, model)
    check_budgets(config, trace, machines)
    sources = PredictorSources(trace, model=model, entries=config.entries, seed=config.seed)
    sys.stderr.write("finding predictors and counting those that need no training\n")
    variants, missing = list_variants(config, sources)
    for name, reason in missing.items():
        sys.stderr.write(f"left out: {name}: {reason}\n")
    cases = list(list_cases(config, variants, machines))
    rows = replay_all(cases, config, sources)
    results = make_results(
        config,
        sources,
        machines=machines,
        variants=variants,
        missing=missing,
        rows=rows,
        seconds=time.perf_counter() - started,
    )
    show(results, console=Console())
    if config.figures:
        condition = figure_condition(config)
        path = write_report(results, rows, folder=config.folder, condition=condition)
        sys.stderr.write(f"report: {path}\n")
    return results


def replay_all(
    cases: Sequence[ReplayCase], config: EvaluateConfig, sources: PredictorSources
) -> list[Row]:
    """Return the figures of each case, from the run folder or replayed now.

    Equal digests mean equal figures: they are of the case, the steps, the forecasts and the code.
    """
    folder = config.folder / "replays"
    finished = FinishedPieces(folder)
    digest_of: dict[str | None, str] = {None: ""}
    digest_of |= {key: predictor.digest for key, predictor in sources.found.items()}
    others = (sources.trace.digest, str(config.replay_tokens), code_digest())
    digests = [
        case.digest(*others, *(digest_of[key] for key in case.variant.forecasts)) for case in cases
    ]
    missing = {
        digest: case
        for digest, case in zip(digests, cases, strict=True)
        if config.overwrite or not finished.path(digest).exists()
    }
    console = Console(stderr=True)
    total = len(set(digests))
    if len(missing) < total:
        console.print(f"{total - len(missing)} of {total} replays are finished", highlight=False)
    jobs = make_jobs(missing, config, sources)
    workers = config.workers or os.cpu_count() or 1
    with progress(console, "replaying", total=len(missing)) as advance:
        run_jobs(jobs, folder=folder, workers=workers, advance=advance)
    return [finished.read(digest) for digest in digests]


def make_jobs(
    cases: Mapping[str, ReplayCase], config: EvaluateConfig, sources: PredictorSources
) -> list[ReplayJob]:
    """Return the replays of cases, given by digest: those that share steps and forecasts as one."""
    found = sources.found
    jobs: dict[tuple[Any, ...], ReplayJob] = {}
    for digest, case in cases.items():
        variant = case.variant
        key: tuple[Any, ...] = (case.condition.batch, *variant.forecasts)
        if variant.predictor not in found:
            # No forecasts to record once for all of them: smaller jobs share the work better.
            key = (*key, variant.label, case.hardware.name)
        if key not in jobs:
            jobs[key] = ReplayJob(
                trace=sources.trace.path,
                new_tokens=config.replay_tokens,
                predictors={name: found[name] for name in variant.forecasts if name is not None},
                cases=[],
            )
        jobs[key].cases.append((digest, case))
    return [*jobs.values()]


def find_traced_model(trace: Trace, model: ModelConfig) -> ModelConfig | None:
    """Return the configured model if it is the traced one and on this machine, else None."""
    try:
        return None if find_differences(trace.spec, model) else model
    except CheckpointError:
        return None


def list_machines(
    hardware: Sequence[HardwareConfig], shape: ShapeConfig, model: ModelConfig | None
) -> list[Hardware]:
    """Return the machines with experts of the shape's size or, if measured, the model's.

    Raises:
        TrainError: the model is needed and is not on this machine.
    """
    own = [f"hardware={config.name}" for config in hardware if config.measured]
    own += ["shape=trace"] * shape.is_own
    if own and model is None:
        raise TrainError(
            f"{own[0]} needs the traced model, which is not on this machine: name it "
            "(model=..., model.id=FOLDER), or choose shape=qwen1.5-moe and hardware=rtx4090-pcie4"
        )
    return describe_machines(hardware, shape, model)


def check_budgets(config: EvaluateConfig, trace: Trace, machines: Sequence[Hardware]) -> None:
    """Refuse, before hours of replays, budgets and batches that cannot be replayed.

    Raises:
        BudgetError: a budget is malformed, or too small for the experts of one token.
        TrainError: fewer held-out requests than a batch, or no generated tokens.
    """
    for machine in machines:
        for budget in config.budget:
            budget_slots(budget, trace.spec, machine)
    for batch in config.batches:
        try:
            held_out_steps(trace, batch=batch, new_tokens=config.replay_tokens)
        except TrainError:
            raise
        except MoecastError as error:
            raise TrainError(
                f"batch_size={batch}: the trace {trace.path} has too few held-out requests "
                f"({error})"
            ) from error
