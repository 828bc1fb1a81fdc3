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


def forecast(layer: int, *, chance: float = 0.9, priority: float | None = None) -> Forecast:
    """Forecasts expert 0."""
    priority_E = None if priority is None else np.full(4, priority, np.float32)
    return Forecast(layer, np.array([[chance, 0, 0, 0]], np.float32), priority_E=priority_E)


def core_of(system: SystemConfig, *, slots: int = 8, spec=SPEC):
    chunks = [(1, 1, 1)] * spec.num_layers
    return build_device_cache(system, spec, num_slots=[[slots]], chunk_bytes=chunks)


def test_drop_used__evicts_wrong_forecasts_after_routing() -> None:
    core = core_of(SystemConfig(drop_used=True))
    core.begin_step(np.array([0]))
    core.prefetch(1, [2, 3], [1.0, 0.0])
    while (task := core.top.next_task()) is not None:
        core.top.complete(task)
    assert set(core.top.cache) == {(1, 2), (1, 3)}
    core.request_routed(1, {3: 1})
    assert set(core.top.cache) == {(1, 3)}
    core.release((1, 3))
    assert set(core.top.cache) == set()


SIX = tiny_spec(num_layers=6, num_experts=4, top_k=1)


def asked(forecasts, *, layer_now: int, **options):
    """Experts in the order in which the link would fetch them."""
    core = core_of(SystemConfig(per_layer=False, **options), slots=24, spec=SIX)
    ForecastScheduler(core, top_k=SIX.top_k).schedule(forecasts, layer_now=layer_now)
    return core.top.queue.low()


def test_lookahead_layers__counts_from_the_next_routed_layer() -> None:
    every = [forecast(layer) for layer in range(6)]
    assert [layer for layer, _ in asked(every, layer_now=-1, lookahead_layers=1)] == [0]
    assert [layer for layer, _ in asked(every, layer_now=-1, lookahead_layers=2)] == [0, 1]
    # The router of layer 2 has spoken: layer 3 is next.
    assert [layer for layer, _ in asked(every, layer_now=3, lookahead_layers=1)] == [3]
    assert [layer for layer, _ in asked(every, layer_now=3)] == [3, 4, 5]


def test_priority__of_moe_infinity_is_the_ratio_with_a_linear_decay() -> None:
    # .5 (1 - 5 / 6) < .2 (1 - 2 / 6): the predictor's ratios count, not the probabilities.
    far, near = forecast(4, chance=0.9, priority=0.5), forecast(1, chance=0.5, priority=0.2)
    for name in ("moe-infinity-sequence", "moe-infinity-request"):
        found = asked([far, near], layer_now=0, priority=load_system(name).priority)
        assert found == [(1, 0), (4, 0)]
    assert asked([far, near], layer_now=0, priority="probability") == [(4, 0), (1, 0)]


def test_priority__of_fmoe_is_probability_over_distance() -> None:
    # .9 three layers ahead is .3, .4 one layer ahead is .4 (fMoE, section 4.5).
    both = [forecast(2, chance=0.9), forecast(0, chance=0.4)]
    assert asked(both, layer_now=-1, priority=load_system("fmoe").priority) == [(0, 0), (2, 0)]


TWO = tiny_spec(num_layers=1, num_experts=4, top_k=2)


def pair_times(name: str) -> list[float]:
    """Times of three steps of an empty cache with LRU and without forecasts."""
    bare = {"eviction": "lru", "eviction_options": {}, "fill_first_layers": False}
    system = replace(load_system(name), prefetch=False, **bare)
    steps = [routed_step([[pair]]) for pair in ((1, 3), (1, 2), (0, 2))]
    return times(system, steps, spec=TWO, slots=3)


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
