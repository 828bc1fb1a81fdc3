"""Memory and speed at each budget, from replays of recorded routing on this measured machine."""

from collections.abc import Sequence
from typing import Any

from predictors.spec import ModelSpec
from runtime.engine.auto_budget import PROCESS_BYTES
from runtime.engine.forecasters import SystemPredictors
from runtime.errors import BudgetError
from runtime.policy.budget import Budget, SlotRequirements, count_bytes, divide_slots
from runtime.presets import DEFAULT_SYSTEM, ON_DEMAND, load_system
from runtime.sim.hardware import Hardware
from runtime.sim.replay import replay
from runtime.sim.step import RecordedStep


def sweep_budgets(
    steps: Sequence[RecordedStep],
    *,
    spec: ModelSpec,
    hardware: Hardware,
    predictors: SystemPredictors,
    budgets: Sequence[str],
    needs: SlotRequirements,
    resident_bytes: int,
) -> list[dict[str, Any]]:
    """Make a row for each budget: bytes, slots, memory of the process and each system's figures.

    Args:
        steps: What the model routed.
        spec: The model.
        hardware: The measured machine.
        predictors: Those of `DEFAULT_SYSTEM`, which is compared with fetching on demand.
        budgets: A row of a budget below the minimum has an `error` in place of figures.
        needs: The experts' sizes. In replays, all take the same time.
        resident_bytes: Non-expert weights'.
    """
    systems = {ON_DEMAND: SystemPredictors(), DEFAULT_SYSTEM: predictors}
    rows: list[dict[str, Any]] = []
    for budget in budgets:
        try:
            (counts,) = divide_slots(Budget.parse(budget), needs, [needs.experts])
        except BudgetError as error:
            rows.append({"budget": budget, "error": str(error)})
            continue
        slots, figures = sum(counts.values()), {}
        for name, chosen in systems.items():
            stats = replay(
                steps,
                chosen.forecast and chosen.forecast.renewed(),
                spec=spec,
                system=load_system(name),
                hardware=hardware,
                budget_slots=slots,
                reuse_predictor=chosen.reuse and chosen.reuse.renewed(),
            )
            summary = stats.as_dict()
            total = sum(stats.ttft_seconds) + sum(stats.tpot_seconds)
            figures[name] = {
                "tpot_seconds": summary["tpot_seconds"],
                "ttft_seconds": summary["ttft_seconds"],
                "hit_rate": summary["decode"]["hit_rate"],
                "stall_share": stats.stall_seconds / total if total else None,
            }
        size = count_bytes(counts) + needs.scratch_bytes
        rows.append(
            {
                "budget": budget,
                "bytes": size,
                "slots": slots,
                "process_bytes": size + resident_bytes + PROCESS_BYTES,
                "systems": figures,
            }
        )
    return rows
