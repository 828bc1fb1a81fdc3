"""`python -m tests.builders.core_runs FIRST END`: random runs of the policy core, as JSON.

The compiled core, its Python files (`MOECAST_COMPILED=0`), these placing experts as on several
devices and these looping over experts as they do where compiled must give the same. The random
numbers depend on the seeds alone, never on an answer of the core.

Shape suffixes: H horizons, T tokens, K top_k, L layers, E experts.
"""

import hashlib
import json
import random
import sys
from dataclasses import replace
from typing import Any

import numpy as np

from predictors.base import Forecast, Predictor, Signal
from predictors.spec import ModelSpec
from runtime.config import SystemConfig
from runtime.policy.build import build_device_cache
from runtime.policy.device_cache import DeviceCache
from runtime.policy.eviction import registry, regret
from runtime.policy.forecast_scheduler import ForecastScheduler
from runtime.policy.placement import ExpertPlacement
from runtime.policy.queue import PREFETCH_ORDERS
from runtime.sim.hardware import MeasuredHardware, Overheads
from runtime.sim.replay import replay
from tests.builders.entries import tiny_spec
from tests.builders.simulated import routed_step
from tests.builders.spans import RecordedSpans

SPEC = tiny_spec(num_layers=4, num_experts=8, top_k=2)
CHUNKS = (10, 10, 20)
NUM_EVENTS = 400
EVENTS_HASHED_TOGETHER = 4
STEPS = 40


class RandomPredictor(Predictor):
    """Forecasts some layers at random, or the reuse of the layer that was routed."""

    kind = "random"

    def __init__(self, seed: int, *, spec: ModelSpec, num_rows: int = 0):
        super().__init__(spec)
        self._random = np.random.default_rng(seed)
        self._num_rows = num_rows
        signal = Signal.ROUTED if num_rows else Signal.GATE_INPUT
        self.signals = frozenset({signal})  # type: ignore[misc]

    def _scores(self, num_rows: int) -> np.ndarray:
        # Few distinct values, so that there are ties.
        values = self._random.integers(0, 9, (num_rows, self.spec.num_experts)) / 8
        return values.astype(np.float32)

    def gate_input(self, layer, hidden_TD):
        ahead = self._random.integers(1, 3)
        layers = range(layer + 1, min(layer + 1 + int(ahead), self.spec.num_layers))
        return [Forecast(at, self._scores(1)) for at in layers]

    def routed(self, layer, experts_TK, logits_TE):
        return [Forecast(layer, self._scores(self._num_rows))]


def random_system(chance: random.Random, seed: int) -> SystemConfig:
    """Returns a system of random parts, with any eviction policy."""
    switches = ("chunked", "whole_requests", "early_preemption", "reordered", "cancel")
    more = ("per_layer", "hot_first", "drop_used", "idle_prefetch", "synchronous", "host_window")
    eviction = sorted(registry.EVICTIONS)[seed % len(registry.EVICTIONS)]
    options: dict[str, Any] = {"warmup_steps": 5} if eviction == "static" else {}
    return SystemConfig(
        eviction=eviction,
        eviction_options=options,
        priority=chance.choice(sorted(PREFETCH_ORDERS)),
        candidates=chance.choice(["named", "named", "all", "slots"]),
        least_prefetch=chance.choice([0, 15, 100]),
        **{name: chance.random() < 0.5 for name in switches},
        **{name: chance.random() < 0.3 for name in more},
    )


def run_replay(seed: int) -> dict[str, Any]:
    """Replays random steps on a random machine; returns every time and counter."""
    chance, rng = random.Random(seed), np.random.default_rng(seed)
    system = random_system(chance, seed)
    layers = range(SPEC.num_layers)

    def draw() -> np.ndarray:
        return rng.permutation(SPEC.num_experts)[: SPEC.top_k]

    sizes = [5 if step % 20 == 0 else 1 for step in range(STEPS)]
    steps = [routed_step([[draw() for _ in range(size)] for _ in layers]) for size in sizes]
    if system.eviction == "belady":
        known = chance.choice([None, 1, 3])
        future = [[np.unique(step.experts(layer)).tolist() for layer in layers] for step in steps]
        system = replace(system, eviction_options={"known_steps": known, "future": future})
    hardware = MeasuredHardware(
        name="random", chunk_bytes=CHUNKS, transfer_fixed=0.1, transfer_per_byte=0.02,
        layer_fixed=1.0, layer_per_token=0.1, expert_fixed=0.2, expert_per_token=0.05,
        predictor_seconds=chance.choice([0.1, 1.3]),
        overheads=Overheads(
            num_readers=chance.choice([1, 2]), transfer_speed_together=chance.choice([1.0, 0.6]),
            transfer_speed_computing=chance.choice([1.0, 0.7]),
            compute_speed_transferring=chance.choice([1.0, 0.8]),
        ),
    )  # fmt: skip
    timeline = RecordedSpans()
    stats = replay(
        steps, RandomPredictor(seed, spec=SPEC), spec=SPEC, system=system, hardware=hardware,
        budget_slots=chance.randint(SPEC.top_k, 24), timeline=timeline,
        reuse_predictor=RandomPredictor(seed + 1, spec=SPEC, num_rows=1),
    )  # fmt: skip
    parts = [system.eviction, system.priority, system.candidates]
    hashes = {"stats": hash_values(stats.as_dict()), "events": hash_values(timeline.spans)}
    return {"system": parts, "tpot_seconds": stats.tpot_seconds, **hashes}


def run_operations(seed: int) -> list[str]:
    """Calls a random core's methods in a random order; returns a hash of what each leaves."""
    chance, rng = random.Random(seed), np.random.default_rng(seed)
    system = random_system(chance, seed)
    if system.eviction == "belady":
        # It must be followed step by step.
        system = replace(system, eviction="lru", eviction_options={})
    num_slots = [chance.randint(6, 16), chance.randint(8, 32)][: chance.randint(1, 2)]
    first_slots = [  # enough of the largest for a token
        [chance.choice([0, 0, slots // 3]) for _ in range(SPEC.num_layers)] for slots in num_slots
    ]
    core = build_device_cache(
        system, SPEC, num_slots=[num_slots], first_slots=[first_slots],
        chunk_bytes=[CHUNKS] * SPEC.num_layers,
    )  # fmt: skip
    scheduler = ForecastScheduler(core, top_k=SPEC.top_k)
    answers: list[Any] = []
    hashes: list[str] = []
    flying: list[list[Any]] = [[] for _ in core.tiers]
    core.begin_step(np.zeros(1, np.int64))
    layer, pending = 0, list[int]()
    for number in range(NUM_EVENTS):
        event = chance.randrange(8)
        depth = chance.randrange(len(core.tiers))
        tier = core.tiers[depth]
        if event == 0 and pending:
            e = pending.pop(0)
            core.request((layer, e))
            if core.is_ready((layer, e)):
                core.release((layer, e))
            else:
                core.cancel(layer, [e])
        elif event == 1 and not pending:
            chosen = sorted(chance.sample(range(SPEC.num_experts), SPEC.top_k))
            core.on_reuse_scores(layer, rng.random((1, SPEC.num_experts), np.float32))
            core.on_tokens_routed(layer, np.array([chosen]))
            pending = core.request_routed(layer, {e: chance.randint(1, 3) for e in chosen})
            answers.append(list(pending))
        elif event == 2 and not pending:
            layer = (layer + 1) % SPEC.num_layers
            if layer == 0:
                core.end_step()
                core.begin_step(np.zeros(1, np.int64))
        elif event == 3:
            at = chance.randrange(SPEC.num_layers)
            scores_TE = (rng.integers(0, 9, (1, SPEC.num_experts)) / 8).astype(np.float32)
            scheduler.schedule([Forecast(at, scores_TE)], layer_now=layer)
        elif event in (4, 5):
            if not flying[depth] and (task := tier.next_task()) is not None:
                flying[depth].append(task)
                answers.append([*task.expert, task.slot, task.end_chunk, task.num_bytes, task.high])
        elif flying[depth]:
            task = flying[depth].pop()
            (tier.retry if chance.random() < 0.1 else tier.complete)(task)
        if (number + 1) % EVENTS_HASHED_TOGETHER == 0:
            hashes.append(hash_values([answers, describe(core)]))
            answers.clear()
    return hashes


def describe(core: DeviceCache) -> list[Any]:
    """Returns all that can be seen of a core."""
    found = []
    for tier in core.tiers:
        entries = sorted(tier.cache.entries.items())
        found.append([
            [[*e, one.slot, one.ready_chunks, one.pins, one.in_flight] for e, one in entries],
            [list(expert) for expert in tier.queue.low()],
            [list(expert) for expert in tier.queue.requested],
            [counters.as_dict() for counters in tier.counters],
        ])  # fmt: skip
    return found


def hash_values(values: Any) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:12]


def use_loops() -> None:
    """Lets the Python files loop over experts, as they do where compiled."""
    for name, module in list(sys.modules.items()):
        if name.startswith("runtime.policy.") and hasattr(module, "COMPILED"):
            module.COMPILED = True  # type: ignore[attr-defined]


def use_placement() -> None:
    """Lets the one device look up every expert's device, as each of several does."""
    initialise = DeviceCache.__init__

    def place(self, *arguments, **options) -> None:
        initialise(self, *arguments, **{**options, "placement": ExpertPlacement()})

    DeviceCache.__init__ = place  # type: ignore[method-assign]


def runs(first: int, end: int) -> list[Any]:
    """What a JSON file of the results would hold."""
    results = [[run_replay(seed), run_operations(seed)] for seed in range(first, end)]
    return json.loads(json.dumps(results))


if __name__ == "__main__":
    seeds = int(sys.argv[1]), int(sys.argv[2])
    found: dict[str, Any] = {"is_python": regret.__file__.endswith(".py"), "plain": runs(*seeds)}
    use_placement()
    found["placed"] = runs(*seeds)
    if "--loops" in sys.argv:
        use_loops()
        found["loops"] = runs(*seeds)
    json.dump(found, sys.stdout)
