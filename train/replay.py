"""FetchRate and what hangs on it: held-out requests replayed on a simulated machine."""

from collections.abc import Iterable, Iterator
from typing import Any

from predictors.base import Predictor
from predictors.spec import ModelSpec
from runtime.budget import Budget, SlotRequirements, count_slots
from runtime.config import SystemConfig
from runtime.policy.counters import sum_counters
from runtime.sim.hardware import Hardware
from runtime.sim.replay import replay
from runtime.sim.step import RecordedStep


def first_tokens(steps: Iterable[RecordedStep], num_tokens: int) -> Iterator[RecordedStep]:
    """Steps, prefills included, until `num_tokens` tokens were generated."""
    seen = 0
    for step in steps:
        if seen >= num_tokens:
            return
        seen += len(step.tokens_T) == 1
        yield step


def budget_slots(budget: str, spec: ModelSpec, hardware: Hardware) -> int:
    """Experts that a budget holds, of the size that the hardware profile gives them.

    Raises:
        BudgetError: not a budget, or less than one token needs in one layer.
    """
    needs = SlotRequirements.of(spec, slot_bytes=sum(hardware.chunk_bytes))
    return count_slots(Budget.parse(budget), needs)


def fetch_table(
    steps: Iterable[RecordedStep],
    predictor: Predictor | None,
    *,
    system: SystemConfig,
    hardware: Hardware,
    spec: ModelSpec,
    slots: int,
) -> dict[str, Any]:
    """FetchRate and the joint figure per layer over decode steps, and all of the counters."""
    stats = replay(
        steps, predictor, spec=spec, system=system, hardware=hardware, budget_slots=slots
    )
    return {
        "fetch_rate": [one.fetch_rate for one in stats.decode],
        "joint": [one.joint_rate if one.predicted else None for one in stats.decode],
        "mean_fetch_rate": sum_counters(stats.decode).fetch_rate,
        "mean_joint": sum_counters(stats.decode).joint_rate,
        "replay": stats.as_dict(),
    }
