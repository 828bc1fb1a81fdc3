"""The trace to train on: the one that is named, or one made for the occasion."""

import json

from rich.console import Console

from collect.record import collect, default_folder, settings_of
from collect.traces import Trace, TraceSignal
from collect.traces.manifest import MANIFEST, read_manifest
from runtime.config import ModelConfig
from runtime.models import identity, resolve
from train.config import TrainConfig
from train.errors import TrainError

SIGNALS = (TraceSignal.GATE_INPUT, TraceSignal.EXPERTS, TraceSignal.WEIGHTS)
"""What training and scoring read. The rest of what can be recorded is more than half the bytes."""


def trace_for(config: TrainConfig) -> Trace:
    """Opens the trace of this model and data; records it first, or what is missing of it.

    A finished trace that was named is taken whatever its prompts were, if it is of this model.

    Raises:
        TrainError: it is of another model, or lacks a signal.
        TraceError, PromptError, DiskSpaceError, CheckpointError: as `collect.record.collect`.
    """
    named = config.trace
    if named is not None and (named / MANIFEST).exists() and read_manifest(named).complete:
        trace = Trace.open(named)
        require_model(trace, config.model)
        missing = [str(signal) for signal in SIGNALS if signal not in trace.signals]
        if missing:
            raise TrainError(
                f"trace={named} has no {', '.join(missing)}; collect one with signals="
                f"[{','.join(SIGNALS)}], or name a folder that is not there yet"
            )
        return trace
    settings = settings_of(config.data, seed=config.seed)
    folder = named or default_folder(config.model, config.data, signals=SIGNALS, settings=settings)
    return collect(
        config.model,
        config.data,
        folder=folder,
        signals=SIGNALS,
        settings=settings,
        console=Console(stderr=True),
    )


def require_model(trace: Trace, model: ModelConfig) -> None:
    """TrainError, naming both sides, when the trace is of another model, revision or dtype."""
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
            f"trace={trace.path} was recorded from another model ({listed}). "
            "Name another folder to record one of this model"
        )
