"""What each eviction policy keeps: hit rates of held-out requests, between LRU and Belady.

    python benchmarks/eviction.py trace=runs/traces/qwen2-moe-tiny/NAME hardware=rtx4090-pcie4
        output=benchmarks/results/eviction.json

Any trace with routing will do: one of `python -m collect model=qwen2-moe-tiny data=pydocs`, or one
imported from a published log.
"""

import json
import random
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from collect.traces import Trace
from collect.traces.reader import TraceStep
from configs.compose import compose_typed
from predictors.base import Predictor
from predictors.metrics import Phase
from predictors.spec import ModelSpec
from runtime.config import SystemConfig
from runtime.policy.cache import ExpertCache
from runtime.policy.counters import sum_counters
from runtime.policy.eviction.registry import EVICTIONS, make_eviction_policy
from runtime.sim.hardware import Hardware, described
from runtime.sim.replay import replay
from train.replay import budget_slots, first_tokens
from zoo import load_predictor

BUDGETS = ("10%", "25%", "50%", "75%")
NUM_TOKENS = 2_000
"""For the stream in which every token is a step; the generated stream is all that is held out."""
NEW_TOKENS = 500
"""For the runs in which promoe prefetches with `mlp`, as in replay.py."""
ON_DEMAND = SystemConfig(name="on-demand", prefetch=False, chunked=False)
PROMOE = SystemConfig()
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


def token_by_token(steps: Iterable[TraceStep], num_tokens: int) -> Iterator[TraceStep]:
    """Every token, prompts included, as a step of its own."""
    left = num_tokens
    for step in steps:
        for place in range(min(left, step.num_tokens)):
            token = step.tokens_T[place : place + 1]
            yield TraceStep(Phase.DECODE, step.request, step.first_row + place, token, step.read)
        left -= min(left, step.num_tokens)


def with_gap(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adds each row's share of the gap between LRU and Belady; null where there is none."""
    rate = {row["eviction"]: row["hit_rate"] for row in rows}
    gap = rate["belady"] - rate["lru"]
    for row in rows:
        row["gap_closed"] = (row["hit_rate"] - rate["lru"]) / gap if gap > 0 else None
    return rows


def compared(
    steps: list[TraceStep],
    predictor: Predictor | None,
    system: SystemConfig,
    *,
    spec: ModelSpec,
    hardware: Hardware,
) -> list[dict[str, Any]]:
    """Every policy at every budget, decode steps only."""
    rows: list[dict[str, Any]] = []
    for budget in BUDGETS:
        slots = budget_slots(budget, spec, hardware)
        block = []
        for name in EVICTIONS:
            stats = replay(
                steps,
                predictor,
                spec=spec,
                system=replace(system, eviction=name),
                hardware=hardware,
                budget_slots=slots,
            )
            figures, decode = stats.as_dict(), sum_counters(stats.decode)
            block.append(
                {
                    "budget": budget,
                    "eviction": name,
                    "hit_rate": decode.hit_rate,
                    "requests": decode.requests,
                    "bytes_moved": decode.bytes_moved,
                    "tpot_seconds": figures["tpot_seconds"],
                }
            )
        rows += with_gap(block)
    return rows


def microseconds_per_layer(name: str, *, per_layer: bool) -> float:
    """Bookkeeping of one routed layer: 4 experts asked for, half of all experts resident."""
    rng = random.Random(0)
    order = [rng.sample(range(TIMED.num_experts), TIMED.num_experts) for _ in range(24)]
    weights = [(rank + 1) ** -0.7 for rank in range(TIMED.num_experts)]
    future = [
        [sorted(set(rng.choices(order[layer], weights, k=TIMED.top_k))) for layer in range(24)]
        for _ in range(TIMED_STEPS)
    ]
    shape = {"num_layers": TIMED.num_layers, "num_experts": TIMED.num_experts}
    options = {"future": future} if name == "belady" else {}
    cache = ExpertCache(
        num_slots=TIMED.num_layers * TIMED.num_experts // 2,
        num_layers=TIMED.num_layers,
        per_layer=per_layer,
        policy=make_eviction_policy(name, **shape, options=options),
    )
    seconds = 0.0
    for layers in future:
        asked = [dict.fromkeys(chosen, 1) for chosen in layers]
        start = time.process_time()
        cache.begin_step(False)
        for layer, tokens_per_expert in enumerate(asked):
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


def main(arguments: dict[str, str]) -> None:
    trace = Trace.open(Path(arguments["trace"]))
    config, _ = compose_typed("train", [f"hardware={arguments['hardware']}"])
    hardware = described(config.hardware, config.shape)
    generated = list(trace.steps("held_out"))
    each_token = list(token_by_token(generated, NUM_TOKENS))
    first = list(first_tokens(generated, NEW_TOKENS))
    predictor = load_predictor(f"{trace.spec.model_id}/mlp", spec=trace.spec)
    tables: dict[str, Any] = {}
    everything = replace(ON_DEMAND, per_layer=False)
    for name, steps, used, system in (
        ("generated, per-layer", generated, None, ON_DEMAND),
        ("generated, global", generated, None, everything),
        ("every token, per-layer", each_token, None, ON_DEMAND),
        ("generated, per-layer, prefetched", first, predictor, PROMOE),
    ):
        tables[name] = compared(steps, used, system, spec=trace.spec, hardware=hardware)
    report = {
        "trace": trace.digest,
        "dataset": trace.manifest.plan.dataset,
        "hardware": vars(config.hardware),
        "decode_steps": {
            "generated": sum(step.num_tokens == 1 for step in generated),
            "every token": len(each_token),
            "prefetched": sum(step.num_tokens == 1 for step in first),
        },
        "tables": tables,
        "microseconds_per_routed_layer": {
            arena: {
                name: round(
                    min(microseconds_per_layer(name, per_layer=per_layer) for _ in range(3)), 1
                )
                for name in EVICTIONS
            }
            for arena, per_layer in (("per-layer", True), ("global", False))
        },
    }
    Path(arguments["output"]).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main(dict(argument.split("=", 1) for argument in sys.argv[1:]))
