"""The time that no system can beat: by hand, against every possible run, and against replays."""

from dataclasses import replace
from itertools import combinations, islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.presets import load_system
from runtime.sim.hardware import Overheads
from runtime.sim.lower_bound import bound_time, count_least_misses
from runtime.sim.replay import replay
from tests.builders.arena import random_routing
from tests.builders.entries import tiny_spec
from tests.builders.simulated import one_token, routed_step, toy_accelerator, toy_machine

SPEC = tiny_spec(num_layers=3, num_experts=8, top_k=2)
MEASURED = toy_machine(layer_fixed=1.0, predictor_seconds=0.0)
"""An expert comes in 6 s; a layer takes 1 s and an expert 1 s a token."""
TWO_TIERS = toy_accelerator(
    link_bytes_per_second=1.0, link_latency_seconds=0.1, memory_bytes_per_second=100.0,
    kernel_seconds=0.01, chunk_bytes=(1, 1, 1), layer_bytes=1, store_bytes_per_second=0.4,
    host_share=0.6,
)  # fmt: skip
TWO_READERS = replace(MEASURED, overheads=Overheads(num_readers=2, transfer_speed_together=0.8))


def random_steps(seed: int, *, num_steps: int) -> list:
    """Steps of one token; every twentieth is a prompt of six."""
    counts = [6 if i % 20 == 0 else 1 for i in range(num_steps)]
    tokens = iter(random_routing(seed, steps=sum(counts), layers=3, experts=8, top_k=2))
    return [routed_step(list(zip(*islice(tokens, n), strict=True))) for n in counts]


def fewest_transfers(layers: list[list], num_slots: int) -> int:
    """Fewest transfers of all runs, by trying every content at first and after each layer."""
    experts = sorted({expert for chosen in layers for expert in chosen})
    sizes = range(num_slots + 1)
    costs = {frozenset(some): 0 for size in sizes for some in combinations(experts, size)}
    for chosen in layers:
        after: dict[frozenset, int] = {}
        for resident, cost in costs.items():
            new = cost + len(set(chosen) - resident)
            known = sorted(resident | set(chosen))
            for size in sizes:
                for kept in map(frozenset, combinations(known, size)):
                    after[kept] = min(after.get(kept, new), new)
        costs = after
    return min(costs.values())


CHOSEN = st.lists(st.integers(0, 4), min_size=1, max_size=3, unique=True)


@given(layers=st.lists(CHOSEN, min_size=1, max_size=7), num_slots=st.integers(1, 4))
def test_least_misses__no_run_transfers_less(layers, num_slots) -> None:
    experts = [[(0, e) for e in chosen] for chosen in layers]
    assert count_least_misses(experts, num_slots) == fewest_transfers(experts, num_slots)


def test_bound__is_the_computation_once_all_is_resident() -> None:
    steps = [routed_step([[(0, 1)], [(2, 3)], [(4, 5)]])] * 8
    bound = bound_time(steps, spec=SPEC, hardware=MEASURED, num_slots=24)
    # Three layers of 1 s, each with two experts of 1 s.
    assert (bound.decode_seconds, bound.tpot_seconds, bound.ttft_seconds) == (8 * 9.0, 9.0, None)


def test_bound__counts_the_transfers_that_the_link_must_make() -> None:
    # Two experts take turns. One was there and stays; the other is fetched in its five steps.
    spec = tiny_spec(num_layers=1, num_experts=2, top_k=1)
    steps = [one_token(i % 2) for i in range(10)]
    assert bound_time(steps, spec=spec, hardware=MEASURED, num_slots=1).decode_seconds == 5 * 6.0


@pytest.mark.parametrize("hardware", [MEASURED, TWO_READERS, TWO_TIERS])
@pytest.mark.parametrize("num_slots", [6, 18])
@pytest.mark.parametrize("name", ["on-demand", "oracle", "lfu", "deepspeed"])
def test_bound__no_replay_is_faster(name: str, num_slots: int, hardware) -> None:
    system, steps = load_system(name), random_steps(num_slots, num_steps=60)
    stats = replay(steps, None, spec=SPEC, system=system, hardware=hardware, budget_slots=num_slots)
    bound = bound_time(steps, spec=SPEC, hardware=hardware, num_slots=num_slots)
    assert bound.num_prefills == len(stats.ttft_seconds) == 3
    assert bound.num_decode_steps == len(stats.tpot_seconds) == 57
    assert min(bound.prefill_seconds, bound.decode_seconds) > 0
    bound.assert_holds(stats)


def test_bound__a_faster_replay_is_refused() -> None:
    steps = random_steps(0, num_steps=30)
    options = {"spec": SPEC, "hardware": MEASURED}
    stats = replay(steps, None, system=load_system("lfu"), budget_slots=12, **options)
    bound = bound_time(steps, num_slots=12, **options)
    faster = [seconds / 4 for seconds in stats.tpot_seconds]
    with pytest.raises(AssertionError):
        bound.assert_holds(replace(stats, tpot_seconds=faster))
    with pytest.raises(AssertionError):
        bound.assert_holds(replace(stats, ttft_seconds=[bound.prefill_seconds / 2]))
