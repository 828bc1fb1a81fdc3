"""Measurements of the report on the trace: hit rates by cache size, accuracy by trace size."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collect.traces import Trace
from collect.traces.layout import Split
from collect.traces.reader import TraceStep
from predictors.base import Predictor
from predictors.baselines import PopularityPredictor, TokenPredictor
from predictors.metrics import sum_means
from predictors.registry import REUSE_PREDICTORS
from runtime.policy.counters import sum_counters
from runtime.policy.eviction.registry import EVICTIONS
from runtime.sim.hardware import RooflineHardware
from runtime.sim.step import first_request
from train.accuracy import score_layers
from train.eviction_eval import eviction_system, gap_closed, record_stream, replay_policy
from train.nonlearned import fit_popularity, fit_token
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


SHARES = (0.125, 0.25, 0.5, 1.0)
"""Shares of the training requests."""
COUNTED: Mapping[str, Callable[[Trace], Predictor]] = {
    TokenPredictor.kind: fit_token,
    PopularityPredictor.kind: fit_popularity,
}
"""Kinds that take no more than seconds on any trace."""


class TraceShare(Trace):
    """A trace of which some training requests are not looked at."""

    def __init__(self, whole: Trace, kept: set[int]):
        super().__init__(whole.path, whole.manifest, whole._shards, whole.request_table)
        self._kept = np.array(sorted(kept))

    def rows(self, split: str) -> NDArray[np.int64]:
        rows = super().rows(split)
        if Split(split) is not Split.TRAIN:
            return rows
        return rows[np.isin(self.requests[rows], self._kept)]

    def steps(self, split: str | None = None) -> Iterator[TraceStep]:
        for step in super().steps(split):
            request = first_request(step)
            training = self.request_table[request].split is Split.TRAIN
            if not training or request in self._kept:
                yield step


def take_share(trace: Trace, share: float) -> TraceShare:
    """A share of the training requests; a smaller one is part of a larger one."""
    train = [request for request in trace.request_table if request.split is Split.TRAIN]
    train.sort(key=lambda one: hashlib.sha256(f"ceiling {one.digest}".encode()).hexdigest())
    return TraceShare(
        trace, {request.index for request in train[: max(1, round(len(train) * share))]}
    )


def measure_growth(trace: Trace) -> list[dict[str, Any]]:
    """Rows as `benchmarks/ceiling.py` writes them, for the kinds that are counted; held out."""
    rows = []
    for share in SHARES:
        part = take_share(trace, share)
        seen = part.rows("train")
        for kind, fit in COUNTED.items():
            layers = [score.overall for score in score_layers(fit(part), trace)]
            known = [score.value for score in layers if score.value is not None]
            if not known:
                continue  # it forecasts nothing from what this trace has
            rows.append(
                {
                    "predictor": kind,
                    "train_tokens": len(seen),
                    "prompts": len(np.unique(trace.requests[seen])),
                    "mean_accuracy": sum_means(layers).value,
                    "worst_layer_accuracy": min(known),
                }
            )
    return rows
