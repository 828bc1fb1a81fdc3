"""The papers' systems as configurations, and each knob that they need against cases by hand."""

from dataclasses import replace

import pytest

from predictors.base import known_options
from predictors.registry import KINDS, REUSE_PREDICTORS
from runtime.config import SystemConfig
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
