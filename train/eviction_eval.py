"""Hit rates of held-out requests under every eviction policy, as a table."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from collect.traces import Trace
from collect.traces.reader import TraceStep
from predictors.base import Predictor
from predictors.registry import REUSE_PREDICTORS
from predictors.spec import ModelSpec
from predictors.table import Table, format_or_dash
from runtime.config import SystemConfig
from runtime.errors import BudgetError
from runtime.policy.counters import sum_counters
from runtime.presets import load_system
from runtime.sim.hardware import RooflineHardware
from runtime.sim.replay import ReplayStats, replay
from runtime.sim.step import ArrayStep, RecordedStep
from train.evaluate.forecasts import RecordedForecasts, record_forecasts, routing_only
from train.replay import budget_slots, first_tokens

POLICIES = (
    "lru",
    "lfu",
    "regret",
    "moe-infinity-sequence",
    "moe-infinity-request",
    *REUSE_PREDICTORS,
    "belady",
)
"""Eviction policies; the kinds of `REUSE_PREDICTORS` stand for `reuse` eviction by them."""
BUDGETS = ("10%", "25%", "50%", "75%")
PHASES = ("decode", "prefill")
PER_LAYER = "generated, per-layer"
"""Replay of generated tokens, each layer with its own arena."""

ANY = RooflineHardware(
    name="any",
    link_bytes_per_second=1e9,
    link_latency_seconds=0.0,
    memory_bytes_per_second=1e12,
    flops=1e15,
    kernel_seconds=0.0,
    predictor_seconds=0.0,
    chunk_bytes=(1,),
    layer_bytes=1,
)
"""Nothing is prefetched, so the contents of the arena do not depend on the machine's speed."""
DEFINITION = (
    "hit rate: share of needed experts that are in the arena when their router asks, nothing "
    "prefetched; gap closed: (hit rate - LRU) / (Belady - LRU), held-out requests"
)


HitRates = dict[str, float | None]
"""Those of one policy by phase, `decode` and `prefill`, and the shares of the gap to Belady,
`decode_gap_closed`, `prefill_gap_closed`. None: not measured, or there is no gap."""
PolicyTables = Mapping[str, Mapping[str, Mapping[str, HitRates]]]
"""By stream and arena, by budget, by policy."""


SYSTEM = "on-demand-at-once"
"""The system on which eviction policies are compared: nothing is prefetched, and experts are
fetched and computed in the order in which they do so with prefetching."""


@dataclass(frozen=True)
class RoutedStream:
    """Steps to replay under every eviction policy: their routing and the forecasts of reuse.

    Both are read and computed once, because they depend on neither the policy nor the cache.
    """

    spec: ModelSpec
    steps: Sequence[ArrayStep]
    forecasts: Mapping[str, RecordedForecasts]
    """By kind of predictor."""

    def replay(self, system: SystemConfig, budget: str) -> ReplayStats:
        """Replay it under the system's eviction policy; a kind in `forecasts` stands for `reuse`.

        Nothing is prefetched. A budget that is too small for one token in one layer is taken as the
        least that is not.
        """
        try:
            slots = budget_slots(budget, self.spec, ANY)
        except BudgetError:
            slots = self.spec.top_k
        forecasts = self.forecasts.get(system.eviction)
        return replay(
            self.steps,
            None,
            spec=self.spec,
            system=system if forecasts is None else replace(system, eviction="reuse"),
            hardware=ANY,
            budget_slots=slots,
            reuse_predictor=None if forecasts is None else forecasts.predictor(self.spec),
        )


def record_stream(
    steps: Sequence[RecordedStep], reuse_predictors: Iterable[Predictor], spec: ModelSpec
) -> RoutedStream:
    """Read the steps' routing, and show them to new copies of the reuse predictors."""
    routing = [routing_only(step, spec.num_layers) for step in steps]
    forecasts = {one.kind: record_forecasts(one.renewed(), steps) for one in reuse_predictors}
    return RoutedStream(spec, routing, forecasts)


def token_by_token(steps: Iterable[TraceStep], num_tokens: int) -> Iterator[TraceStep]:
    """Yield every token, prompts included, as a separate step."""
    places = ((step, row) for step in steps for row in range(step.rows.start, step.rows.stop))
    for step, row in islice(places, num_tokens):
        yield replace(step, rows=slice(row, row + 1))


def compare_policies(
    trace: Trace,
    reuse_predictors: Sequence[Predictor],
    *,
    num_tokens: int,
    split: str | None = "held_out",
) -> dict[str, dict[str, dict[str, HitRates]]]:
    """Return hit rates by stream and arena, budget and policy.

    `generated`: prompts in one step, then token by token; `every token`: prompts token by token
    too, as many as `num_tokens`.
    """
    tables = {}
    for requests, cut in (("every token", token_by_token), ("generated", first_tokens)):
        steps = list(cut(trace.steps(split), num_tokens))
        stream = record_stream(steps, reuse_predictors, trace.spec)
        for arena, per_layer in (("per-layer", True), ("global", False)):
            tables[f"{requests}, {arena}"] = rate_policies(stream, per_layer=per_layer)
    return tables


def rate_policies(stream: RoutedStream, *, per_layer: bool) -> dict[str, dict[str, HitRates]]:
    """Return the hit rates of the policies that the stream has forecasts for, by budget."""
    system = replace(load_system(SYSTEM), per_layer=per_layer)
    tables: dict[str, dict[str, HitRates]] = {}
    for budget in BUDGETS:
        rates = tables[budget] = {}
        for policy in POLICIES:
            if policy in REUSE_PREDICTORS and policy not in stream.forecasts:
                continue
            stats = stream.replay(replace(system, eviction=policy), budget)
            rates[policy] = {
                phase: sum_counters(getattr(stats, phase)).hit_rate for phase in PHASES
            }
        for own in rates.values():
            own |= {
                f"{phase}_gap_closed": gap_closed(
                    rates["lru"][phase], own[phase], rates["belady"][phase]
                )
                for phase in PHASES
            }
    return tables


def gap_closed(low: float | None, rate: float | None, high: float | None) -> float | None:
    """Return the share of the gap between two rates, None where there is no gap."""
    if low is None or rate is None or high is None or high <= low:
        return None
    return (rate - low) / (high - low)


def decode_figures(tables: PolicyTables, kind: str) -> dict[str, float | None]:
    """Return a predictor's hit rates, and its shares of the gap, of generated tokens."""
    figures: dict[str, float | None] = {}
    for budget in BUDGETS:
        rates = tables[PER_LAYER][budget][kind]
        percent = budget.rstrip("%")
        figures[f"hit_rate_{percent}"] = rates["decode"]
        figures[f"gap_closed_{percent}"] = rates["decode_gap_closed"]
    return figures


def gap_table(tables: PolicyTables) -> Table:
    """Return hit rate (share of the gap) of generated tokens, for each arena.

    Those of every token, which no system is served by, are in the results alone.
    """

    def cell(row: Mapping[str, Any]) -> str:
        shown = format_or_dash(row["decode"], "{:.3f}".format)
        gap = row["decode_gap_closed"]
        return shown if gap is None else f"{shown} ({gap:.0%})"

    rows = [
        {"requests, arena": name, "eviction policy": policy, "budget": budget, **rates}
        for name, by_budget in tables.items()
        if name.startswith("generated")
        for budget, policies in by_budget.items()
        for policy, rates in policies.items()
    ]
    return Table.pivot(rows, ["requests, arena", "eviction policy"], "budget", cell)
