"""Memory and speed at each budget, from replays of recorded routing on this measured machine."""

from collections.abc import Sequence
from typing import Any

from predictors.base import Predictor
from predictors.spec import ModelSpec
from runtime.config import SystemConfig
from runtime.engine.auto_budget import PROCESS_BYTES
from runtime.errors import BudgetError
from runtime.policy.budget import Budget, SlotRequirements, count_slots
from runtime.presets import ON_DEMAND, PROMOE, load_system
from runtime.sim.hardware import Hardware
from runtime.sim.replay import replay
from runtime.sim.step import RecordedStep


def sweep_budgets(
    steps: Sequence[RecordedStep],
    *,
    spec: ModelSpec,
    hardware: Hardware,
    predictor: Predictor | None,
    budgets: Sequence[str],
    slot_bytes: int,
    scratch_bytes: int,
    resident_bytes: int,
) -> list[dict[str, Any]]:
    """Make a row for each budget: bytes, slots, memory of the process and each system's figures.

    `resident_bytes` are those of non-expert weights. The row of a budget below the minimum has an
    `error` in place of figures.
    """
    systems: dict[str, tuple[SystemConfig, Predictor | None]] = {
        ON_DEMAND: (load_system(ON_DEMAND), None)
    }
    if predictor is not None:
        systems[PROMOE] = (load_system(PROMOE), predictor)
    needs = SlotRequirements.of(spec, slot_bytes=slot_bytes, scratch_bytes=scratch_bytes)
    rows: list[dict[str, Any]] = []
    for budget in budgets:
        try:
            slots = count_slots(Budget.parse(budget), needs)
        except BudgetError as error:
            rows.append({"budget": budget, "error": str(error)})
            continue
        figures = {}
        for name, (system, chosen) in systems.items():
            stats = replay(
                steps, chosen, spec=spec, system=system, hardware=hardware, budget_slots=slots
            )
            summary = stats.as_dict()
            total = sum(stats.ttft_seconds) + sum(stats.tpot_seconds)
            figures[name] = {
                "tpot_seconds": summary["tpot_seconds"],
                "ttft_seconds": summary["ttft_seconds"],
                "hit_rate": summary["decode"]["hit_rate"],
                "stall_share": stats.stall_seconds / total if total else None,
            }
        size = slots * slot_bytes + scratch_bytes
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
