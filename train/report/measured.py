"""The report's own measurement on the trace: hit rates of eviction policies by cache size."""

from collections.abc import Sequence
from dataclasses import dataclass

from collect.traces import Trace
from predictors.base import Predictor
from predictors.registry import REUSE_PREDICTORS
from runtime.policy.counters import sum_counters
from runtime.policy.eviction.registry import EVICTIONS
from runtime.sim.hardware import RooflineHardware
from train.eviction_eval import eviction_system, gap_closed, record_stream, replay_policy
from train.replay import budget_slots, first_tokens

BUDGETS = (10, 25, 50, 75)
"""Percent of all experts."""
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


@dataclass
class HitRateRow:
    """Share of the experts that generated tokens find in the arena, for one policy and size."""

    cache_percent: int
    eviction: str
    hit_rate: float | None
    gap_closed: float | None = None
    """Share of the gap between LRU and Belady; None: not measured, or no gap."""


def measure_hit_rates(
    trace: Trace, reuse_predictors: Sequence[Predictor], *, num_tokens: int
) -> list[HitRateRow]:
    """Return a row for each budget and policy; `reuse` is named by its predictors.

    The arena is divided by layers, and nothing is prefetched (ProMoE, figure 5 b). The replay is
    long enough to rank the policies; `moecast train reuse` has a longer one.
    """
    steps = list(first_tokens(trace.steps("held_out"), num_tokens))
    stream = record_stream(steps, reuse_predictors, trace.spec)
    policies = [policy for policy in EVICTIONS if policy not in REUSE_PREDICTORS]
    policies += stream.forecasts
    system = eviction_system()
    rows: list[HitRateRow] = []
    for budget in BUDGETS:
        rates: dict[str, HitRateRow] = {}
        for policy in policies:
            stats = replay_policy(
                policy,
                stream,
                spec=trace.spec,
                system=system,
                hardware=ANY,
                slots=budget_slots(f"{budget}%", trace.spec, ANY),
            )
            rates[policy] = HitRateRow(budget, policy, sum_counters(stats.decode).hit_rate)
        for row in rates.values():
            row.gap_closed = gap_closed(
                rates["lru"].hit_rate, row.hit_rate, rates["belady"].hit_rate
            )
        rows += rates.values()
    return rows
