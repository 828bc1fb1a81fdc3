"""What each budget would cost and bring: replays of recorded routing on this machine, measured."""

from collections.abc import Sequence
from typing import Any

from predictors.base import Predictor
from predictors.spec import ModelSpec
from predictors.units import MIB
from runtime.budget import Budget, SlotRequirements, count_slots
from runtime.config import SystemConfig
from runtime.errors import BudgetError
from runtime.policy.systems import ON_DEMAND, PROMOE, load_system
from runtime.sim.hardware import Hardware
from runtime.sim.replay import replay
from runtime.sim.step import RecordedStep

PROCESS_BYTES = 300 * MIB
"""What a process takes beside weights and budget, at most (`verify` measures it)."""
SHARE_OF_FREE = 0.9
"""Of the memory that is free, what a suggested budget leaves the rest of."""


def outlook(
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
    """A row for each budget: bytes, slots, memory of the process, and each system's figures.

    `resident_bytes` are those of the weights that are not experts. A budget below the least has
    its error in place of figures.
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
        size = slots * slot_bytes + scratch_bytes
        rows.append(
            {
                "budget": budget,
                "bytes": size,
                "slots": slots,
                "process_bytes": size + resident_bytes + PROCESS_BYTES,
                "systems": {
                    name: expected(steps, spec, system, hardware, chosen, slots)
                    for name, (system, chosen) in systems.items()
                },
            }
        )
    return rows


def expected(
    steps: Sequence[RecordedStep],
    spec: ModelSpec,
    system: SystemConfig,
    hardware: Hardware,
    predictor: Predictor | None,
    slots: int,
) -> dict[str, Any]:
    """TPOT and TTFT in seconds, hit rate of decode steps, share of the time spent waiting."""
    stats = replay(
        steps, predictor, spec=spec, system=system, hardware=hardware, budget_slots=slots
    )
    figures = stats.as_dict()
    total = sum(stats.ttft_seconds) + sum(stats.tpot_seconds)
    return {
        "tpot_seconds": figures["tpot_seconds"],
        "ttft_seconds": figures["ttft_seconds"],
        "hit_rate": figures["decode"]["hit_rate"],
        "stall_share": stats.stall_seconds / total if total else None,
    }


def suggestion(
    *, total_bytes: int, least_bytes: int, resident_bytes: int, available_bytes: int
) -> int | None:
    """Bytes to give as a budget: every expert if they fit, else what free memory leaves.

    None where that is less than one step needs.
    """
    room = int(SHARE_OF_FREE * available_bytes) - resident_bytes - PROCESS_BYTES
    budget = min(total_bytes, room)
    return budget if budget >= least_bytes else None
