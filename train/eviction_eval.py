"""Hit rates of held-out requests under every eviction policy, as a table."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from collect.traces import Trace
from collect.traces.reader import TraceStep
from predictors.base import Predictor
from predictors.registry import REUSE_PREDICTORS
from predictors.spec import ModelSpec
from predictors.table import Table
from runtime.config import SystemConfig
from runtime.policy.counters import sum_counters
from runtime.presets import load_system
from runtime.sim.hardware import Hardware, RooflineHardware
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


def eviction_system() -> SystemConfig:
    """Return the system on which eviction policies are compared: nothing is prefetched.

    Experts are fetched and computed in the order in which they do so with prefetching.
    """
    return load_system("on-demand-at-once")


@dataclass(frozen=True)
class RoutedStream:
    """Steps to replay under every eviction policy: their routing and the forecasts of reuse.

    Both are read and computed once, because they depend on neither the policy nor the cache.
    """

    steps: Sequence[ArrayStep]
    forecasts: Mapping[str, RecordedForecasts]
    """By kind of predictor."""

    @property
    def policies(self) -> list[str]:
        """The policies under which it can be replayed."""
        return [
            policy
            for policy in POLICIES
            if policy not in REUSE_PREDICTORS or policy in self.forecasts
        ]


def record_stream(
    steps: Sequence[RecordedStep], reuse_predictors: Iterable[Predictor], spec: ModelSpec
) -> RoutedStream:
    """Read the steps' routing, and show them to new copies of the reuse predictors."""
    forecasts = {}
    for predictor in reuse_predictors:
        forecasts[predictor.kind] = record_forecasts(predictor.renewed(), steps)
    return RoutedStream([routing_only(step, spec.num_layers) for step in steps], forecasts)


def replay_policy(
    policy: str,
    stream: RoutedStream,
    *,
    spec: ModelSpec,
    system: SystemConfig,
    hardware: Hardware,
    slots: int,
) -> ReplayStats:
    """Replay the stream under one eviction policy."""
    forecasts = stream.forecasts.get(policy)
    return replay(
        stream.steps,
        None,
        spec=spec,
        system=replace(system, eviction=policy if forecasts is None else "reuse"),
        hardware=hardware,
        budget_slots=slots,
        reuse_predictor=None if forecasts is None else forecasts.predictor(spec),
    )


def token_by_token(steps: Iterable[TraceStep], num_tokens: int) -> Iterator[TraceStep]:
    """Yield every token, prompts included, as a separate step."""
    left = num_tokens
    for step in steps:
        for row in range(min(left, step.num_tokens)):
            first = step.rows.start + row
            yield replace(step, rows=slice(first, first + 1))
        left -= min(left, step.num_tokens)


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
    generated = record_stream(
        list(first_tokens(trace.steps(split), num_tokens)), reuse_predictors, trace.spec
    )
    every_token = record_stream(
        list(token_by_token(trace.steps(split), num_tokens)), reuse_predictors, trace.spec
    )
    per_layer = eviction_system()
    everything = replace(per_layer, per_layer=False)
    streams: tuple[tuple[str, RoutedStream, SystemConfig], ...] = (
        ("every token, per-layer", every_token, per_layer),
        ("every token, global", every_token, everything),
        ("generated, per-layer", generated, per_layer),
        ("generated, global", generated, everything),
    )
    return {
        name: rate_policies(stream, trace.spec, system=system) for name, stream, system in streams
    }


def rate_policies(
    stream: RoutedStream, spec: ModelSpec, *, system: SystemConfig
) -> dict[str, dict[str, HitRates]]:
    """Return the hit rates of the stream's policies by budget."""
    tables: dict[str, dict[str, HitRates]] = {}
    for budget in BUDGETS:
        rates = tables[budget] = {}
        for policy in stream.policies:
            stats = replay_policy(
                policy,
                stream,
                spec=spec,
                system=system,
                hardware=ANY,
                slots=budget_slots(budget, spec, ANY),
            )
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
    rows: list[list[str]] = []
    for name, by_budget in tables.items():
        if not name.startswith("generated"):
            continue
        for policy in by_budget[BUDGETS[0]]:
            cells = []
            for budget in BUDGETS:
                rate = by_budget[budget][policy]["decode"]
                shown = "-" if rate is None else f"{rate:.3f}"
                gap = by_budget[budget][policy]["decode_gap_closed"]
                cells.append(shown if gap is None else f"{shown} ({gap:.0%})")
            rows.append([name, policy, *cells])
    return Table.of(["requests, arena", "eviction policy", *BUDGETS], rows, left=2)
