"""Hit rate against cache size under every eviction policy, and Belady's bound (promoe, figure 5 b).

A short replay, long enough to rank the policies; `python -m train reuse` has the long one.
"""

from dataclasses import replace
from typing import Any

from collect.traces import Trace
from predictors.base import Predictor
from predictors.reuse.forecaster import ReusePredictor
from runtime.policy.counters import sum_counters
from runtime.policy.eviction.registry import EVICTIONS
from runtime.sim.hardware import RooflineHardware
from runtime.sim.replay import replay
from train.kept import eviction_system, share_closed
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
"""Nothing is prefetched, so what is in the arena does not depend on how fast anything is."""


def hit_rates(
    trace: Trace, reuse_predictor: Predictor | None, *, num_tokens: int
) -> list[dict[str, Any]]:
    """For each budget and policy the share of experts that generated tokens found in the arena,
    which is divided by layers, and where that lies between LRU and Belady; `reuse` is left out
    without the forecaster it asks.
    """
    steps = list(first_tokens(trace.steps("held_out"), num_tokens))
    on_demand = eviction_system()
    rows: list[dict[str, Any]] = []
    for budget in BUDGETS:
        slots = budget_slots(f"{budget}%", trace.spec, ANY)
        for policy in EVICTIONS:
            asked = None
            if policy == ReusePredictor.kind:
                if reuse_predictor is None:
                    continue
                # Made anew: it remembers what it has seen.
                asked = type(reuse_predictor).from_files(
                    trace.spec, reuse_predictor.files(), reuse_predictor.options()
                )
            stats = replay(
                steps,
                None,
                spec=trace.spec,
                system=replace(on_demand, eviction=policy),
                hardware=ANY,
                budget_slots=slots,
                reuse_predictor=asked,
            )
            rows.append(
                {
                    "cache_percent": budget,
                    "eviction": policy,
                    "hit_rate": sum_counters(stats.decode).hit_rate,
                }
            )
        rates = {one["eviction"]: one["hit_rate"] for one in rows if one["cache_percent"] == budget}
        for one in rows[-len(rates) :]:
            one["gap_closed"] = share_closed(rates["lru"], one["hit_rate"], rates["belady"])
    return rows
