"""Hit rates of every eviction policy on held-out requests, between LRU and Belady."""

import random
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.config import EvictionConfig
from benchmarks.papers.eval_context import load_hardware, load_shape
from benchmarks.reports import write_report
from collect.traces import Trace
from collect.traces.reader import TraceStep
from predictors.base import Predictor
from predictors.metrics import Phase
from predictors.spec import ModelSpec
from runtime.config import SystemConfig
from runtime.policy.cache import ExpertCache
from runtime.policy.counters import sum_counters
from runtime.policy.eviction.registry import EVICTIONS, make_eviction_policy
from runtime.policy.systems import ON_DEMAND, PROMOE, load_system
from runtime.sim.hardware import Hardware, described
from runtime.sim.replay import replay
from runtime.sim.step import RecordedStep
from train.replay import budget_slots, first_tokens
from zoo import load_predictor

BUDGETS = ("10%", "25%", "50%", "75%")
SHAPE = "qwen1.5-moe"
NUM_TOKENS = 2_000
"""Length of the stream in which every token is a step; the generated stream is not cut."""
NEW_TOKENS = 500
"""Length of the stream on which promoe prefetches."""
TIMED = ModelSpec(
    model_id="timed",
    revision="-",
    config_hash="-",
    num_layers=24,
    num_experts=60,
    top_k=4,
    hidden_size=1,
    dtype="float32",
)
"""Qwen1.5-MoE's shape, for the cost of the bookkeeping itself."""
TIMED_STEPS = 300
REPETITIONS = 3


@dataclass(frozen=True, kw_only=True)
class EvictionRow:
    """Decode steps of one policy at one budget."""

    budget: str
    eviction: str
    hit_rate: float | None
    requests: int
    bytes_moved: int
    tpot_seconds: float
    gap_closed: float | None = None
    """Share of the gap between LRU and Belady; None where there is no gap."""


@dataclass(frozen=True, kw_only=True)
class EvictionReport:
    trace: str
    dataset: str
    hardware: dict[str, Any]
    decode_steps: dict[str, int]
    """Length of each stream."""
    tables: dict[str, list[EvictionRow]]
    microseconds_per_routed_layer: dict[str, dict[str, float]]
    """Cost of the bookkeeping by arena and policy."""


def split_tokens(steps: Iterable[TraceStep], num_tokens: int) -> Iterator[TraceStep]:
    """Yields every token, those of prompts included, as a step of its own."""
    left = num_tokens
    for step in steps:
        for place in range(min(left, step.num_tokens)):
            token = step.tokens_T[place : place + 1]
            yield TraceStep(Phase.DECODE, step.request, step.first_row + place, token, step.read)
        left -= min(left, step.num_tokens)


def add_gaps(rows: list[EvictionRow]) -> list[EvictionRow]:
    """Adds each policy's share of the gap between LRU and Belady, at one budget."""
    rates = {row.eviction: row.hit_rate or 0.0 for row in rows}
    lru = rates["lru"]
    gap = rates["belady"] - lru
    return [
        replace(row, gap_closed=(rates[row.eviction] - lru) / gap if gap > 0 else None)
        for row in rows
    ]


def compare_policies(
    steps: Sequence[RecordedStep],
    predictor: Predictor | None,
    system: SystemConfig,
    *,
    spec: ModelSpec,
    hardware: Hardware,
) -> list[EvictionRow]:
    """Replays the steps with every policy at every budget."""
    rows: list[EvictionRow] = []
    for budget in BUDGETS:
        block = []
        for name in EVICTIONS:
            stats = replay(
                steps,
                predictor,
                spec=spec,
                system=replace(system, eviction=name),
                hardware=hardware,
                budget_slots=budget_slots(budget, spec, hardware),
            )
            decode = sum_counters(stats.decode)
            block.append(
                EvictionRow(
                    budget=budget,
                    eviction=name,
                    hit_rate=decode.hit_rate,
                    requests=decode.requests,
                    bytes_moved=decode.bytes_moved,
                    tpot_seconds=stats.as_dict()["tpot_seconds"],
                )
            )
        rows += add_gaps(block)
    return rows


def microseconds_per_layer(name: str, *, per_layer: bool) -> float:
    """Times the bookkeeping of one routed layer with half of all experts resident."""
    rng = random.Random(0)
    order = [rng.sample(range(TIMED.num_experts), TIMED.num_experts) for _ in range(24)]
    weights = [(rank + 1) ** -0.7 for rank in range(TIMED.num_experts)]
    future = [
        [sorted(set(rng.choices(order[layer], weights, k=TIMED.top_k))) for layer in range(24)]
        for _ in range(TIMED_STEPS)
    ]
    cache = ExpertCache(
        num_slots=TIMED.num_layers * TIMED.num_experts // 2,
        num_layers=TIMED.num_layers,
        per_layer=per_layer,
        policy=make_eviction_policy(
            name,
            num_layers=TIMED.num_layers,
            num_experts=TIMED.num_experts,
            options={"future": future} if name == "belady" else {},
        ),
    )
    seconds = 0.0
    for layers in future:
        routed = [dict.fromkeys(chosen, 1) for chosen in layers]
        start = time.process_time()
        cache.begin_step(False)
        for layer, tokens_per_expert in enumerate(routed):
            cache.on_routed(layer, tokens_per_expert)
            missing = []
            for e in tokens_per_expert:
                if cache.get((layer, e)) is None:
                    missing.append((layer, e))
                else:
                    cache.on_use((layer, e))
            for expert in missing:
                cache.admit(expert)
        cache.end_step()
        seconds += time.process_time() - start
    return round(1e6 * seconds / (TIMED_STEPS * TIMED.num_layers), 1)


def run_eviction(config: EvictionConfig) -> None:
    trace = Trace.open(config.trace)
    spec, machine = trace.spec, load_hardware(config.hardware)
    hardware = described(machine, load_shape(SHAPE))
    generated = list(trace.steps("held_out"))
    each_token = list(split_tokens(generated, NUM_TOKENS))
    first = list(first_tokens(generated, NEW_TOKENS))
    on_demand, promoe = load_system(ON_DEMAND), load_system(PROMOE)
    predictor = load_predictor(f"{spec.model_id}/{promoe.predictor}", spec=spec)
    streams: dict[str, tuple[Sequence[RecordedStep], Predictor | None, SystemConfig]] = {
        "generated, per-layer": (generated, None, on_demand),
        "generated, global": (generated, None, replace(on_demand, per_layer=False)),
        "every token, per-layer": (each_token, None, on_demand),
        "generated, per-layer, prefetched": (first, predictor, promoe),
    }
    report = EvictionReport(
        trace=trace.digest,
        dataset=trace.manifest.plan.dataset,
        hardware=vars(machine),
        decode_steps={
            "generated": sum(step.num_tokens == 1 for step in generated),
            "every token": len(each_token),
            "prefetched": sum(len(step.tokens_T) == 1 for step in first),
        },
        tables={
            name: compare_policies(*stream, spec=spec, hardware=hardware)
            for name, stream in streams.items()
        },
        microseconds_per_routed_layer={
            arena: {
                name: min(
                    microseconds_per_layer(name, per_layer=per_layer) for _ in range(REPETITIONS)
                )
                for name in EVICTIONS
            }
            for arena, per_layer in (("per-layer", True), ("global", False))
        },
    )
    write_report(config, report)
