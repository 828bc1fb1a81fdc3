"""FetchRate of held-out requests that are replayed on simulated machines."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from typing import Any

from predictors.base import Predictor
from predictors.metrics import good_pred
from predictors.spec import ModelSpec
from runtime.config import HardwareConfig, ModelConfig, ShapeConfig, SystemConfig
from runtime.policy.budget import Budget, SlotRequirements, count_slots
from runtime.policy.counters import sum_counters
from runtime.sim.hardware import Hardware, describe_hardware
from runtime.sim.replay import replay
from runtime.sim.step import RecordedStep


def is_decode(step: RecordedStep) -> bool:
    """Return whether the step has one token of each of its requests."""
    return len(step.tokens_T) == len(set(step.requests_T.tolist()))


def first_tokens(steps: Iterable[RecordedStep], num_tokens: int) -> Iterator[RecordedStep]:
    """Yield steps, prefills included, until `num_tokens` tokens are generated."""
    generated = 0
    for step in steps:
        yield step
        generated += len(step.tokens_T) if is_decode(step) else 0
        if generated >= num_tokens:
            return


def budget_slots(budget: str, spec: ModelSpec, hardware: Hardware) -> int:
    """Experts that a budget holds, of the size that the hardware profile gives them.

    Raises:
        BudgetError: not a budget, or less than one token needs in one layer.
    """
    needs = SlotRequirements.of(spec, slot_bytes=sum(hardware.chunk_bytes))
    return count_slots(Budget.parse(budget), needs)


def measure_fetching(
    steps: Iterable[RecordedStep],
    predictor: Predictor,
    *,
    system: SystemConfig,
    hardware: Hardware,
    budget: str,
) -> dict[str, Any]:
    """GoodPred, its factors and TPOT over decode steps, and all of the counters.

    The cache counts both factors at the same requests of routers. A layer without predictions
    counts 0 in `mean_good_pred`, and is left out of `mean_good_pred_covered`.
    """
    spec = predictor.spec
    slots = budget_slots(budget, spec, hardware)
    stats = replay(
        steps, predictor, spec=spec, system=system, hardware=hardware, budget_slots=slots
    )
    total, times = sum_counters(stats.decode), stats.tpot_seconds
    covered = sum_counters(counters for counters in stats.decode if counters.predicted)
    return {
        "replay_accuracy": [counters.recall for counters in stats.decode],
        "fetch_rate": [counters.fetch_rate for counters in stats.decode],
        "good_pred": [good_pred(counters.recall, counters.fetch_rate) for counters in stats.decode],
        "mean_replay_accuracy": total.recall,
        "mean_fetch_rate": total.fetch_rate,
        "mean_good_pred": good_pred(total.recall, total.fetch_rate),
        "mean_good_pred_covered": good_pred(covered.recall, covered.fetch_rate),
        "covered_layers": sum(counters.predicted > 0 for counters in stats.decode)
        / len(stats.decode),
        "predicted_per_needed": total.predicted / total.requests if total.requests else None,
        "mean_resident": total.resident_rate,
        "mean_promoe_fetch_rate": total.promoe_fetch_rate,
        "mean_promoe_good_pred": total.promoe_good_pred,
        "mean_tpot_ms": 1e3 * sum(times) / len(times) if times else None,
        "replay": stats.as_dict(),
    }


def describe_machines(
    configs: Sequence[HardwareConfig], shape: ShapeConfig, model: ModelConfig | None
) -> list[Hardware]:
    """Return each describe_hardware machine with experts of the shape's size.

    The model is loaded for `shape=trace` and for machines that are measured, once for each; without
    them, none is needed.
    """
    if shape.is_own and not all(config.measured for config in configs):
        from runtime.profiling.local import read_model_shape

        assert model is not None
        shape = read_model_shape(model)
    measured = None
    if any(config.measured for config in configs):
        assert model is not None
        measured = measure_machine(model)
    return [
        measured if config.measured and measured else describe_hardware(config, shape)
        for config in configs
    ]


def measure_machine(model: ModelConfig) -> Hardware:
    """Load the model and return the times of this machine with it."""
    from runtime import load
    from runtime.profiling.local import measure

    loaded = load(model, system=SystemConfig(), budget="50%")
    with closing(loaded.moecast):
        return measure(loaded)
