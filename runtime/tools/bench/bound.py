"""Replay the run's own routing with systems that know it in advance, and bound every time."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from predictors.base import Signal
from runtime.engine.assembly import size_tiers
from runtime.engine.memory import available_memory_bytes
from runtime.errors import BudgetError
from runtime.hf.forced_routing import force_routing
from runtime.hf.loading import load_configured
from runtime.hf.probes import Probes
from runtime.policy.budget import Budget, count_slots
from runtime.profiling.local import measure_stripped
from runtime.sim.lower_bound import bound_time
from runtime.sim.replay import ReplayStats, replay
from runtime.sim.step import ArrayStep
from runtime.tools.bench.rows import BenchRow, add_steps, simulated_rows
from runtime.tools.bench.serve import PrefillMark, generate_tokens
from runtime.tools.bench.tasks import BenchRequest, RequestsTask, find_replayed, list_conditions
from runtime.tools.doctor import RoutingRecorder


def simulate_conditions(task: RequestsTask) -> dict[str, Any]:
    """Measure this machine; in each condition, replay systems that know the future, and the bound.

    The routing of the same requests is recorded first; it does not depend on the budget. All is
    computed on the CPU, with the experts of the store that runs read.

    Returns:
        `hardware`, and `rows` of `BenchRow` as dictionaries.
    """
    config = task.config
    stripped = load_configured(config.model)
    spec = stripped.spec(stripped.folder, config.model)
    store = stripped.open_experts(config.store, spec, [stripped.model.device])
    kept = available_memory_bytes() // 2
    model = stripped.read_on_demand(store, config.model, keep_bytes=kept)
    recorded: dict[int, list[ArrayStep]] = {}
    for batch, requests in task.requests.items():
        with force_routing(stripped.layers, config.routing):
            recorded[batch] = record_steps(model, requests)
    hardware = measure_stripped(stripped, store, spec)
    needs, _ = size_tiers(store, spec, has_host=False)
    rows: list[BenchRow] = []
    for condition in list_conditions(config):
        try:
            slots = count_slots(Budget.parse(condition.budget), needs)
        except BudgetError as error:
            rows += simulated_rows(condition, config.system, str(error))
            continue
        steps, requests = recorded[condition.batch], task.requests[condition.batch]
        *replayed, last = simulated_rows(condition, config.system)
        for row, system in zip(replayed, find_replayed(config.system), strict=True):
            stats = replay(
                steps, None, spec=spec, system=system, hardware=hardware, budget_slots=slots
            )
            bound_time(steps, spec=spec, hardware=hardware, num_slots=slots).assert_holds(stats)
            add_figures(row, stats, requests)
        measured = skip_warm_up(steps, requests)
        bound = bound_time(measured, spec=spec, hardware=hardware, num_slots=slots)
        last.tpot_mean_seconds, last.ttft_mean_seconds = bound.tpot_seconds, bound.ttft_seconds
        rows += [*replayed, last]
    store.close()
    return {"hardware": asdict(hardware), "rows": [asdict(row) for row in rows]}


@torch.no_grad()
def record_steps(model: PreTrainedModel, requests: Sequence[BenchRequest]) -> list[ArrayStep]:
    """Record the experts of each token in every forward pass of the requests."""
    recorder = RoutingRecorder()
    with Probes(model, {Signal.ROUTED}, recorder):
        for request in requests:
            generate_tokens(model, request, PrefillMark(None))
    return recorder.steps


def add_figures(row: BenchRow, stats: ReplayStats, requests: Sequence[BenchRequest]) -> None:
    """Add the measured requests' times; the hit rate is that of all decode steps."""
    ttft, tpot = split_measured_times(stats, requests)
    row.ttft_seconds, row.ttft_mean_seconds = float(np.median(ttft)), float(np.mean(ttft))
    row.tpot_seconds = float(np.median(tpot))
    add_steps(row, tpot)
    row.decode_hit_rate = stats.as_dict()["decode"]["hit_rate"]


def skip_warm_up(
    steps: Sequence[ArrayStep], requests: Sequence[BenchRequest]
) -> Sequence[ArrayStep]:
    """Return the measured requests' steps; each request has as many as it has new tokens."""
    return steps[sum(request.new_tokens for request in requests if not request.is_measured) :]


def split_measured_times(
    stats: ReplayStats, requests: Sequence[BenchRequest]
) -> tuple[list[float], list[float]]:
    """Return prefill and decode times without those of the warm-up, which comes first."""
    skipped = [request.new_tokens for request in requests if not request.is_measured]
    return stats.ttft_seconds[len(skipped) :], stats.tpot_seconds[sum(skipped) - len(skipped) :]
