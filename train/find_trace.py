"""Finds the trace to train on, or records it."""

import json
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from collect.launch.config import LauncherConfig
from collect.record import LOGS, collect_once
from collect.recording import recording_settings
from collect.traces import Trace, TraceSignal
from runtime.config import ModelConfig
from runtime.store.model_source import identity, resolve
from train.config import ScoreConfig, TrainConfig
from train.errors import TrainError
from train.evaluate.config import EvaluateConfig
from train.named_trace import open_named_trace


def find_trace(
    config: TrainConfig | EvaluateConfig | ScoreConfig,
    signals: tuple[TraceSignal, ...],
    *,
    needed: tuple[TraceSignal, ...] | None = None,
    launcher: LauncherConfig | None = None,
    logs: Path = LOGS,
    key: str = "trace",
) -> Trace:
    """Returns the trace of this model and data, after recording what is missing of it.

    A trace that was named must be finished and is used whatever its prompts were, if it is of this
    model and has the signals in `needed`, by default all of them; the model of an imported one is
    not checked. Nothing is recorded into a named folder: its name may be mistyped. A trace of the
    same prompts is reused, as `collect.record.collect_once` says. Messages call the option `key`.

    Raises:
        TrainError: the trace that was named is not there or incomplete, is of another model, or
            lacks a signal.
        TraceError, PromptError, DiskSpaceError, CheckpointError: as `collect.record.collect`.
    """
    named = config.trace
    if named is not None:
        trace = open_named_trace(named, config.model, key=key)
        if trace.manifest.plan.source != "imported":
            require_model(trace, config.model, key=key)
        if trace.spec.hidden_size < 1:
            raise TrainError(
                f"{key}={named} does not say its model's hidden size, to which predictors are "
                "bound: import it again with hidden_size=N"
            )
        # The gate's weights are for one figure only, and not in every routing log.
        have = {*trace.signals, TraceSignal.WEIGHTS}
        needed = needed or signals
        missing = [str(signal) for signal in needed if signal not in have]
        if missing:
            raise TrainError(
                f"{key}={named} has no {', '.join(missing)}; collect one with signals="
                f"[{','.join(needed)}], or name a new folder"
            )
        return trace
    return collect_once(
        config.model,
        config.data,
        signals=signals,
        settings=recording_settings(config.data, seed=config.seed),
        console=Console(stderr=True),
        launcher=launcher,
        logs=logs,
    )


def find_shifted_trace(config: TrainConfig, signals: tuple[TraceSignal, ...]) -> Trace:
    """Returns the trace of the shifted prompts, for scoring only; raises as `find_trace`."""
    return find_trace(
        replace(config, data=config.shifted, trace=config.shifted_trace),
        signals,
        launcher=config.launcher,
        logs=LOGS if config.run_dir is None else config.run_dir / "workers",
        key="shifted_trace",
    )


def require_model(trace: Trace, model: ModelConfig, *, key: str) -> None:
    """Raise TrainError, naming both sides, when the trace is of another model or dtype."""
    wanted = identity(resolve(model), model)
    if model.dtype != "auto":
        wanted["dtype"] = model.dtype
    made_for = trace.spec.as_dict()
    wrong = {key: value for key, value in wanted.items() if made_for[key] != value}
    if wrong:
        listed = "; ".join(
            f"{key}: the trace has {json.dumps(made_for[key])}, model={model.name} has "
            f"{json.dumps(value)}"
            for key, value in wrong.items()
        )
        raise TrainError(
            f"{key}={trace.where} was recorded from another model ({listed}). "
            "Name another folder to record one of this model"
        )
