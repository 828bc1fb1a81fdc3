"""Inputs of a comparison: the trace, its model and the simulated machines."""

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
    """Open the named trace, of any model, or the model's own, recorded if it is missing.

    Raises:
        TraceError: it is damaged, or not finished.
        PromptError, DiskSpaceError, CheckpointError: it cannot be recorded.
    """
    named = config.trace
    if named is not None and has_manifest(named) and read_manifest(named).complete:
        return Trace.open(named)
    from train.find_trace import find_trace

    return find_trace(config, ALL_SIGNALS)


def traced_model(trace: Trace, model: ModelConfig) -> ModelConfig | None:
    """Return the configured model if it is the traced one and on this machine, else None."""
    try:
        made_for = identity(resolve(model), model)
    except CheckpointError:
        return None
    recorded = trace.spec.as_dict()
    return model if all(recorded[key] == value for key, value in made_for.items()) else None


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
    if not own:
        return [describe_hardware(config, shape) for config in hardware]
    # Late: torch, to load the model.
    from train.machines import describe_machines

    assert model is not None
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
            held_out_steps(trace, batch=batch, new_tokens=config.new_tokens)
        except TrainError:
            raise
        except MoecastError as error:
            raise TrainError(
                f"batch={batch}: the trace {trace.path} has too few held-out requests ({error})"
            ) from error
