"""Finds the trace to train on, or records it."""

import json
import shlex
from pathlib import Path

from rich.console import Console

from collect.config import LauncherConfig
from collect.traces import Trace, TraceSignal
from collect.traces.manifest import MANIFEST, has_manifest, read_manifest
from predictors.spec import ModelSpec
from runtime.config import BUILTIN, DenseFormat, ModelConfig
from train.config import TracedConfig
from train.errors import TrainError


def find_trace(
    config: TracedConfig,
    signals: tuple[TraceSignal, ...],
    *,
    needed: tuple[TraceSignal, ...] | None = None,
    launcher: LauncherConfig | None = None,
    logs: Path | None = None,
    key: str = "trace",
) -> Trace:
    """Returns the trace of this model and data, after recording what is missing of it.

    A trace that was named must be finished and is used whatever its prompts were, if it is of this
    model and has the signals in `needed`, by default all of them; the model of an imported one is
    not checked. Nothing is recorded into a named folder: its name may be mistyped. A trace of the
    same prompts is reused, as `collect.record.collect` says. Messages call the option `key`.

    Raises:
        TrainError: the trace that was named is not there or incomplete, is of another model, or
            lacks a signal.
        TraceError, PromptError, DiskFullError, CheckpointError: as `collect.record.collect`.
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
                f"[{','.join(needed)}], or name another trace"
            )
        return trace
    # Late: a trace that was named needs no model to be loaded.
    from collect.plan import recording_settings
    from collect.record import LOGS, collect

    return collect(
        config.model,
        config.data,
        signals=signals,
        settings=recording_settings(config.data, seed=config.seed),
        console=Console(stderr=True),
        launcher=launcher,
        logs=logs or LOGS,
    )


def find_differences(spec: ModelSpec, model: ModelConfig) -> dict[str, tuple[str, str]]:
    """Return the values that name a model, here and there, where the two differ.

    Raises:
        CheckpointError: the model is not on this machine.
    """
    from runtime.store.model_source import identity, resolve

    here, there = spec.as_dict(), identity(resolve(model), model)
    return {key: (here[key], value) for key, value in there.items() if here[key] != value}


def require_model(trace: Trace, model: ModelConfig, *, key: str) -> None:
    """Raise TrainError, naming both sides, when the trace is of another model, dtype or format."""
    wrong = find_differences(trace.spec, model)
    if model.dtype not in ("auto", trace.spec.dtype):
        wrong["dtype"] = trace.spec.dtype, model.dtype
    recorded = trace.manifest.plan.settings.get("dense_format", DenseFormat.OWN)
    if recorded != model.dense_format:
        wrong["dense_format"] = str(recorded), model.dense_format
    if wrong:
        listed = "; ".join(
            f"{key}: the trace has {json.dumps(own)}, model={model.name} has {json.dumps(other)}"
            for key, (own, other) in wrong.items()
        )
        raise TrainError(
            f"{key}={trace.where} was recorded from another model ({listed}). "
            "Name one of this model"
        )


def open_named_trace(named: str | Path, model: ModelConfig, *, key: str = "trace") -> Trace:
    """Opens the finished trace at a folder or address; messages call the option `key`.

    Raises:
        TrainError: there is none, or it is incomplete; the message says how to record it.
        TraceError: it is damaged.
    """
    source = [] if model.id == BUILTIN else [f"model.id={model.id}"]
    record = shlex.join(["moecast", "collect", *source, f"output={named}"])
    # No other prompts are scored unasked.
    is_extra = key.startswith("other_kinds.")
    otherwise = "do without" if is_extra else "record or reuse the trace of this model and data"
    without = f"Leave {key} out to {otherwise}"
    if not has_manifest(named):
        parent, there = Path(named).parent, ""
        if names := sorted(path.parent.name for path in parent.glob(f"*/{MANIFEST}")):
            there = f" {parent} has {', '.join(names)}."
        raise TrainError(f"{key}={named} is not a trace.{there} {without}; {record} records one")
    if not read_manifest(named).complete:
        raise TrainError(
            f"{key}={named} is an incomplete trace. The command that recorded it continues it "
            f"({record}, with the same options). {without}"
        )
    return Trace.open(named)
