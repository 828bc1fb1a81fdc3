"""The papers' systems as configurations, and each knob that they need against cases by hand."""

from dataclasses import replace

import numpy as np
import pytest

from predictors.base import Forecast, known_options
from predictors.registry import KINDS, REUSE_PREDICTORS
from runtime.config import SystemConfig
from runtime.policy.build import build_device_cache
from runtime.policy.forecast_scheduler import ForecastScheduler
from runtime.policy.queue import PREFETCH_ORDERS
from runtime.presets import choice_names, load_system
from runtime.sim.replay import replay
from tests.builders.arena import policy_of
from tests.builders.entries import tiny_spec
from tests.builders.simulated import one_token, routed_step, toy_machine
from tests.unit.runtime.policy.test_device_cache import drain

SPEC = tiny_spec(num_layers=2, num_experts=4, top_k=1)


@pytest.mark.parametrize("name", choice_names("system"))
def test_system__names_parts_that_exist(name: str) -> None:
    one = load_system(name)
    assert one.name == name
    assert one.priority in PREFETCH_ORDERS
    assert one.reuse_predictor is None or one.reuse_predictor in REUSE_PREDICTORS
    future = {"future": []} if one.eviction == "belady" else {}
    policy_of(one.eviction, **one.eviction_options, **future)
    if not one.prefetch:
        assert one.predictor is None
    else:
        assert set(one.predictor_options) <= set(known_options(KINDS[one.predictor]))


STEP = one_token(0, 1)


def times(system: SystemConfig, steps=(STEP,) * 3, *, spec=SPEC, slots=8, layer_fixed=10.0):
    hardware = toy_machine(layer_fixed=layer_fixed)
    stats = replay(steps, None, spec=spec, system=system, hardware=hardware, budget_slots=slots)
    return stats.tpot_seconds


ON_DEMAND = SystemConfig(prefetch=False, chunked=False, early_preemption=False, reordered=False)


def test_drop_used__caches_nothing_for_the_next_step() -> None:
    # 10 + 6 + 1 for each of two layers; then both experts are hits, unless they were dropped.
    assert times(ON_DEMAND) == [34.0, 22.0, 22.0]
    assert times(replace(ON_DEMAND, drop_used=True)) == [34.0, 34.0, 34.0]


def test_drop_used__keeps_permanent_experts() -> None:
    # Klotski, section 6.1: six slots, five of them buffers, hold one expert of the first layer.
    system = replace(ON_DEMAND, eviction="first-layers", per_layer=False, drop_used=True)
    assert times(system, slots=6) == [34.0, 28.0, 28.0]


def core_of(system: SystemConfig, *, slots: int = 8, spec=SPEC):
    chunks = [(1, 1, 1)] * spec.num_layers
    return build_device_cache(system, spec, num_slots=[[slots]], chunk_bytes=chunks)


def test_drop_used__evicts_wrong_forecasts_after_routing() -> None:
    core = core_of(SystemConfig(drop_used=True))
    core.begin_step(np.array([0]))
    core.prefetch(1, [2, 3], [1.0, 0.0])
    drain(core)
    assert set(core.top.cache) == {(1, 2), (1, 3)}
    core.request_routed(1, {3: 1})
    assert set(core.top.cache) == {(1, 3)}
    core.release((1, 3))
    assert set(core.top.cache) == set()


SIX = tiny_spec(num_layers=6, num_experts=4, top_k=1)


# After the router of layer 2, layer 3 is next.
LOOKAHEAD = [(-1, 1, [0]), (-1, 2, [0, 1]), (3, 1, [3]), (3, None, [3, 4, 5])]


@pytest.mark.parametrize(("layer_now", "lookahead", "asked"), LOOKAHEAD)
def test_lookahead_layers__counts_from_the_next_routed_layer(layer_now, lookahead, asked):
    system = SystemConfig(per_layer=False, lookahead_layers=lookahead)
    core = core_of(system, slots=24, spec=SIX)
    every = [Forecast(layer, np.array([[0.9, 0, 0, 0]], np.float32)) for layer in range(6)]
    ForecastScheduler(core, top_k=SIX.top_k).schedule(every, layer_now=layer_now)
    assert [layer for layer, _ in core.top.queue.low()] == asked


PRIORITIES = [("fmoe", "probability-over-distance"), ("moe-infinity-sequence", "layer-decay")]
PRIORITIES += [("moe-infinity-request", "layer-decay")]


@pytest.mark.parametrize(("name", "priority"), PRIORITIES)
def test_priority__is_that_of_the_paper(name: str, priority: str) -> None:
    """`policy/test_queue` has the formulas."""
    assert load_system(name).priority == priority


def pair_times(name: str) -> list[float]:
    """Times of three steps of an empty cache with LRU and without forecasts."""
    bare = {"eviction": "lru", "eviction_options": {}, "fill_first_layers": False}
    system = replace(load_system(name), prefetch=False, **bare)
    steps = [routed_step([[pair]]) for pair in ((1, 3), (1, 2), (0, 2))]
    return times(system, steps, spec=tiny_spec(num_layers=1, num_experts=4, top_k=2), slots=3)


@pytest.mark.parametrize("name", ["fmoe", "moe-infinity-request", "moe-infinity-sequence"])
def test_misses__are_requested_together_or_one_by_one(name: str) -> None:
    # Requested together at 10, there at 16 and 22, each computed for 1; then expert 1 is a hit and
    # computed while expert 2 comes; at last expert 0 comes while expert 2 is computed.
    assert pair_times(name) == [23.0, 17.0, 17.0]
    # Expert 3 is requested at 17, when expert 1 is computed; expert 2 at 11, behind the hit; expert
    # 0 at 10, and expert 2 waits for its turn.
    assert pair_times(f"{name}-one-by-one") == [24.0, 18.0, 18.0]
    assert load_system("on-demand-at-once").reordered


def test_static__shares_two_buffers_among_all_layers() -> None:
    system = load_system("static")
    options = {**system.eviction_options, "counts": [[9, 8, 7, 6], [5, 4, 3, 2]]}
    core = core_of(replace(system, eviction_options=options), slots=7)
    experts = [(layer, e) for layer in range(2) for e in range(4)]
    assert [*filter(core.top.cache.policy.is_permanent, experts)] == experts[:5]


def test_hot_first__computes_experts_with_most_tokens_first() -> None:
    counts, core = {0: 1, 1: 5, 2: 3}, core_of(SystemConfig(hot_first=True))
    assert core.request_routed(0, counts) == [1, 2, 0]
    # What has arrived still comes before what has not.
    for _ in range(3):
        core.top.complete(core.top.next_task())
    for e in counts:
        core.release((0, e)) if core.is_ready((0, e)) else core.cancel(0, [e])
    assert core.request_routed(0, {0: 9, 1: 1}) == [1, 0]


def test_oracle__evicts_nothing_that_is_needed_sooner() -> None:
    # At first both experts are in flight at 0: there at 6 and 12, requested at 10 and 21. Two slots
    # for three experts: layer 0's is kept, layer 1's alternate and are hidden.
    steps = [STEP, one_token(0, 2), STEP]
    assert times(load_system("oracle"), steps, slots=2) == [22.0, 22.0, 22.0]


def test_oracle__fetches_for_the_steps_that_it_knows() -> None:
    # A layer takes 1 s: a step's experts are there after 6 and 12 s and computed by 7 and 13 s. The
    # link is idle from then on, unless the next step is known: its first fetch begins 1 s earlier.
    def seconds(known_steps: int | None) -> list[float]:
        system = replace(load_system("oracle"), eviction_options={"known_steps": known_steps})
        return times(system, [STEP, one_token(2, 3), one_token(2, 3)], layer_fixed=1.0)

    assert seconds(1) == [13.0, 13.0, 4.0]
    assert seconds(2) == seconds(None) == [13.0, 12.0, 4.0]
