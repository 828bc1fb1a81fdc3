"""What an arena keeps under every eviction policy: hit rates of held-out requests, as a table."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.table import Table

from collect.traces import Trace
from collect.traces.reader import TraceStep
from predictors.base import Predictor
from predictors.metrics import Phase
from predictors.reuse.forecaster import ReusePredictor
from runtime.config import SystemConfig
from runtime.policy.counters import sum_counters
from runtime.policy.systems import ON_DEMAND, load_system
from runtime.sim.hardware import Hardware
from runtime.sim.replay import replay
from runtime.sim.step import RecordedStep
from train.replay import budget_slots, first_tokens

POLICIES = (
    "lru",
    "lfu",
    "decayed-lfu",
    "least-stale",
    "moe-infinity-sequence",
    "moe-infinity-request",
    ReusePredictor.kind,
    "belady",
)
BUDGETS = ("10%", "25%", "50%", "75%")

DEFINITION = (
    "hit rate: share of needed experts that are in the arena when their router asks, nothing "
    "prefetched; gap closed: (hit rate - LRU) / (Belady - LRU), held-out requests"
)


def eviction_system() -> SystemConfig:
    """Return the system on which eviction policies are compared: nothing is prefetched.

    Experts are fetched and computed in the order in which they do so with prefetching.
    """
    return replace(load_system(ON_DEMAND), early_preemption=True, reordered=True)


def token_by_token(steps: Iterable[TraceStep], num_tokens: int) -> Iterator[TraceStep]:
    """Every token, prompts included, as a step of its own."""
    left = num_tokens
    for step in steps:
        for place in range(min(left, step.num_tokens)):
            token = step.tokens_T[place : place + 1]
            yield TraceStep(Phase.DECODE, step.request, step.first_row + place, token, step.read)
        left -= min(left, step.num_tokens)


def hit_rates(
    trace: Trace, forecaster: ReusePredictor, hardware: Hardware, *, num_tokens: int
) -> dict[str, dict[str, dict[str, dict[str, float | None]]]]:
    """Stream and arena, budget, policy: hit rate and share of the gap closed, decode and prefill.

    `generated`: prompts in one step, then token by token; `every token`: prompts token by token
    too, as many as `num_tokens`.
    """
    generated = list(first_tokens(trace.steps("held_out"), num_tokens))
    each = list(token_by_token(trace.steps("held_out"), num_tokens))
    on_demand = eviction_system()
    everything = replace(on_demand, per_layer=False)
    tables: dict[str, Any] = {}
    streams: tuple[tuple[str, Sequence[RecordedStep], SystemConfig], ...] = (
        ("every token, per-layer", each, on_demand),
        ("every token, global", each, everything),
        ("generated, per-layer", generated, on_demand),
        ("generated, global", generated, everything),
    )
    for name, steps, system in streams:
        tables[name] = {
            budget: _compared(steps, forecaster, system, trace, hardware, budget)
            for budget in BUDGETS
        }
    return tables


def _compared(
    steps: Sequence[RecordedStep],
    forecaster: ReusePredictor,
    system: SystemConfig,
    trace: Trace,
    hardware: Hardware,
    budget: str,
) -> dict[str, dict[str, float | None]]:
    slots = budget_slots(budget, trace.spec, hardware)
    rates: dict[str, dict[str, float | None]] = {}
    for policy in POLICIES:
        reuse_predictor: Predictor | None = None
        if policy == ReusePredictor.kind:
            reuse_predictor = ReusePredictor.from_files(trace.spec, forecaster.files(), {})
        stats = replay(
            steps,
            None,
            spec=trace.spec,
            system=replace(system, eviction=policy),
            hardware=hardware,
            budget_slots=slots,
            reuse_predictor=reuse_predictor,
        )
        rates[policy] = {
            "decode": sum_counters(stats.decode).hit_rate,
            "prefill": sum_counters(stats.prefill).hit_rate,
        }
    for phase in ("decode", "prefill"):
        low, high = rates["lru"][phase], rates["belady"][phase]
        for one in rates.values():
            one[f"{phase}_gap_closed"] = share_closed(low, one[phase], high)
    return rates


def share_closed(low: float | None, found: float | None, high: float | None) -> float | None:
    """Of the gap between two rates; null where one was not measured or there is no gap."""
    if low is None or found is None or high is None or high <= low:
        return None
    return (found - low) / (high - low)


def gap_table(tables: Mapping[str, Any]) -> Table:
    """A section for each stream and arena, a row for each policy, a column for each budget: hit
    rate (share of the gap).
    """
    table = Table()
    table.add_column("requests, arena: policy", no_wrap=True)
    budgets = list(next(iter(tables.values())))
    for budget in budgets:
        table.add_column(budget, justify="right", no_wrap=True)
    for name, by_budget in tables.items():
        table.add_section()
        table.add_row(f"[bold]{name}[/bold]")
        for policy in POLICIES:
            cells = []
            for budget in budgets:
                one = by_budget[budget][policy]
                rate, gap = one["decode"], one["decode_gap_closed"]
                shown = "-" if rate is None else f"{rate:.3f}"
                cells.append(shown if gap is None else f"{shown} ({gap:.0%})")
            table.add_row(policy, *cells)
    return table
