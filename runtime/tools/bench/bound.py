"""What no system can beat: the run's own routing, replayed by one that knows it beforehand."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from predictors.base import Signal
from predictors.spec import ModelSpec
from runtime.budget import Budget, SlotRequirements, count_slots
from runtime.config import SystemConfig
from runtime.engine.loading import model_spec
from runtime.engine.machine import available_memory_bytes
from runtime.engine.one_by_one import OnDemandReader, attach_experts, load_parts
from runtime.errors import BudgetError
from runtime.hf.probes import Probes
from runtime.profiling.local import measure_parts
from runtime.sim.hardware import Hardware
from runtime.sim.replay import ReplayStats, replay
from runtime.store.base import ExpertStore, max_decoded_bytes, max_slot_bytes
from runtime.store.model_source import resolve
from runtime.tools.bench.child import Mark, continued
from runtime.tools.bench.requests import Request
from runtime.tools.bench.tasks import Replayed
from runtime.tools.doctor.recording import CapturedStep, Recorder


def replay_bounds(task: Replayed) -> dict[str, Any]:
    """The machine as measured, and a row for each condition and bound.

    The routing is that of the same requests, recorded here; it is the same whatever the budget.
    """
    folder = resolve(task.model)
    model, layers, store = load_parts(folder, task.model.dtype)
    spec = model_spec(model, layers, store, folder, task.model)
    attach_experts(OnDemandReader(store, keep_bytes=available_memory_bytes() // 2), layers)
    recorded = {batch: recorded_steps(model, asked) for batch, asked in task.requests.items()}
    hardware = measure_parts(model, layers, store)
    rows: list[dict[str, Any]] = []
    for condition in task.conditions:
        for system in task.systems:
            row: dict[str, Any] = {"budget": condition.budget, "batch": condition.batch}
            row["system"] = system.name
            try:
                slots = slots_in(condition.budget, store, spec)
            except BudgetError as error:
                row["failed"] = str(error)
            else:
                steps, asked = recorded[condition.batch], task.requests[condition.batch]
                row |= bound(steps, asked, spec, system, hardware, slots)
            rows.append(row)
    store.close()
    return {"hardware": asdict(hardware), "rows": rows}


def slots_in(budget: str, store: ExpertStore, spec: ModelSpec) -> int:
    """Experts that the live runs' arena of this budget holds."""
    scratch_bytes = store.scratch_bytes + max_decoded_bytes(store)
    needs = SlotRequirements.of(spec, slot_bytes=max_slot_bytes(store), scratch_bytes=scratch_bytes)
    return count_slots(Budget.parse(budget), needs)


@torch.no_grad()
def recorded_steps(model: PreTrainedModel, requests: Sequence[Request]) -> list[CapturedStep]:
    """Every forward pass of the requests: which experts each token was routed to."""
    recorder = Recorder()
    with Probes(model, {Signal.ROUTED}, recorder):
        for request in requests:
            continued(model, request, Mark(None))
    return recorder.steps


def bound(
    steps: list[CapturedStep],
    requests: Sequence[Request],
    spec: ModelSpec,
    system: SystemConfig,
    hardware: Hardware,
    slots: int,
) -> dict[str, Any]:
    """Figures of the measured requests; the hits are those of all decode steps."""
    stats = replay(
        steps,
        None,
        spec=spec,
        system=system,
        hardware=hardware,
        budget_slots=slots,
    )
    ttft, tpot = measured_times(stats, requests)
    decode = stats.as_dict()["decode"]
    return {
        "ttft_seconds": float(np.median(ttft)),
        "tpot_seconds": float(np.median(tpot)),
        "tpot_p95_seconds": float(np.percentile(tpot, 95)),
        "tpot_p99_seconds": float(np.percentile(tpot, 99)),
        "hit_rate": decode["hit_rate"],
        "steps": tpot,
    }


def measured_times(
    stats: ReplayStats, requests: Sequence[Request]
) -> tuple[list[float], list[float]]:
    """Prefill and decode times without those of the warm-up, which comes first."""
    ttft, tpot = stats.ttft_seconds, stats.tpot_seconds
    for request in requests:
        if not request.is_measured:
            ttft, tpot = ttft[1:], tpot[request.new_tokens - 1 :]
    return ttft, tpot
