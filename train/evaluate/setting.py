"""What a comparison stands on: the trace, whose model it is of, and the simulated machines."""

from collections.abc import Sequence

from collect.traces import Trace
from collect.traces.layout import ALL_SIGNALS
from collect.traces.manifest import has_manifest, read_manifest
from predictors.errors import MoecastError
from runtime.config import HardwareConfig, ModelConfig, ShapeConfig
from runtime.errors import CheckpointError
from runtime.sim.hardware import Hardware, describe_hardware
from runtime.store.model_source import identity, resolve
from train.errors import TrainError
from train.evaluate.config import EvaluateConfig
from train.evaluate.steps import held_out_steps
from train.replay import budget_slots


def open_trace(config: EvaluateConfig) -> Trace:
    """The trace that was named, of whatever model it is, or the model's own, made if need be.

    Raises:
        TraceError: it is damaged, or not finished.
        PromptError, DiskSpaceError, CheckpointError: it cannot be recorded.
    """
    named = config.trace
    if named is not None and has_manifest(named) and read_manifest(named).complete:
        return Trace.open(named)
    from train.tracing import trace_for

    return trace_for(config, ALL_SIGNALS)


def traced_model(trace: Trace, model: ModelConfig) -> ModelConfig | None:
    """The model of the configuration, if it is the traced one and on this machine."""
    try:
        made_for = identity(resolve(model), model)
    except CheckpointError:
        return None
    recorded = trace.spec.as_dict()
    return model if all(recorded[key] == value for key, value in made_for.items()) else None


def machines_of(
    hardware: Sequence[HardwareConfig], shape: ShapeConfig, model: ModelConfig | None
) -> list[Hardware]:
    """The machines with experts of the shape's size; one that is measured has the model's own.

    Raises:
        TrainError: the model is needed, for its sizes or to be measured, and is not here.
    """
    own = [f"hardware={one.name}" for one in hardware if one.measured]
    own += ["shape=trace"] * shape.is_own
    if own and model is None:
        raise TrainError(
            f"{own[0]} is to be taken from the traced model, which is not here: name it "
            "(model=..., model.id=FOLDER), or take shape=qwen1.5-moe and hardware=rtx4090-pcie4"
        )
    if not own:
        return [describe_hardware(one, shape) for one in hardware]
    # Late: torch, to load the model.
    from train.pipeline import machine

    assert model is not None
    return [machine(one, shape, model) for one in hardware]


def check(config: EvaluateConfig, trace: Trace, machines: Sequence[Hardware]) -> None:
    """Before hours of replays: every budget holds a token's experts, every batch can be filled.

    Raises:
        BudgetError: a budget is none, or too small.
        MoecastError: fewer held-out requests than a batch, or no generated tokens.
    """
    for machine in machines:
        for budget in config.budget:
            budget_slots(budget, trace.spec, machine)
    for batch in config.batches:
        try:
            held_out_steps(trace, batch=batch, new_tokens=config.new_tokens)
        except TrainError:
            raise
        except MoecastError as error:
            raise TrainError(
                f"batch={batch}: the trace {trace.path} has too few held-out requests ({error})"
            ) from error


def figure_place(config: EvaluateConfig) -> tuple[str, int]:
    """Budget and batch size of the figures that show one of each: 50 % where it is among them, or
    the middle one; the smallest batch.
    """
    middle = config.budget[len(config.budget) // 2]
    return ("50%" if "50%" in config.budget else middle), config.batches[0]
