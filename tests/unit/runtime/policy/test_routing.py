"""Which replica a request goes to: hand-made replicas, and every queue's bound."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictors.base import Forecast
from runtime.policy.routing import (
    ROUTINGS,
    CacheAware,
    LeastLoaded,
    Replica,
    RoundRobin,
    expected_mass,
    overlap,
)

NOTHING = np.zeros((2, 4), dtype=np.float32)


def replica(name, experts=(), *, running=0, waiting=0, healthy=True):
    resident_LE = np.zeros((2, 4), dtype=np.bool_)
    for expert in experts:
        resident_LE[expert] = True
    return Replica(
        name=name,
        resident_LE=resident_LE,
        running=running,
        waiting=waiting,
        max_running=4,
        max_waiting=2,
        healthy=healthy,
    )


def mass(*experts):
    found = NOTHING.copy()
    for expert in experts:
        found[expert] = 1.0
    return found


def test_mass__is_the_expected_number_of_tokens():
    scores_TE = np.array([[0.5, 0.0, 1.0, 0.0], [0.25, 0.0, 1.0, 0.0]], dtype=np.float32)
    found = expected_mass([Forecast(1, scores_TE)], num_layers=2, num_experts=4)
    assert found.tolist() == [[0, 0, 0, 0], [0.75, 0, 2.0, 0]]


def test_overlap__is_the_share_of_calls_that_find_their_expert():
    half = replica("a", [(0, 1), (1, 2)])
    assert overlap(mass((0, 1), (0, 2)), half.resident_LE) == 0.5
    assert overlap(mass((0, 1), (1, 2)), half.resident_LE) == 1.0
    assert overlap(NOTHING, half.resident_LE) == 0.0


@given(seed=st.integers(0, 2**16), name=st.sampled_from(sorted(ROUTINGS)))
def test_routing__never_names_a_full_or_unwell_replica(seed, name):
    rng = random.Random(seed)
    routing = ROUTINGS[name]()
    for _ in range(12):
        replicas = [
            replica(
                str(i),
                [(rng.randrange(2), rng.randrange(4)) for _ in range(rng.randrange(4))],
                running=rng.randint(0, 4),
                waiting=rng.randint(0, 2),
                healthy=rng.random() < 0.8,
            )
            for i in range(rng.randint(1, 4))
        ]
        wanted = mass((0, rng.randrange(4))) if rng.random() < 0.7 else NOTHING
        chosen = routing.choose(wanted, replicas)
        takers = [i for i, one in enumerate(replicas)
                  if one.healthy and one.running + one.waiting < 6]  # fmt: skip
        assert (chosen in takers) if takers else chosen is None
        assert routing.choose(wanted, replicas) == chosen  # asking changes nothing
        if chosen is not None:
            routing.sent(wanted, replicas[chosen])


def test_round_robin__goes_around():
    routing, replicas = RoundRobin(), [replica(name) for name in "abc"]
    order = []
    for _ in range(6):
        chosen = routing.choose(NOTHING, replicas)
        routing.sent(NOTHING, replicas[chosen])
        order.append(chosen)
    assert order == [0, 1, 2, 0, 1, 2]


def test_least_loaded__takes_the_least_busy_and_equal_ones_in_turn():
    routing = LeastLoaded()
    assert routing.choose(NOTHING, [replica("a", running=3), replica("b", running=1)]) == 1
    idle = [replica("a"), replica("b")]
    first = routing.choose(NOTHING, idle)
    routing.sent(NOTHING, idle[first])
    assert routing.choose(NOTHING, idle) != first


def test_cache_aware__goes_where_the_experts_are():
    routing = CacheAware()
    here, there = replica("a", [(0, 0), (1, 0)]), replica("b", [(0, 3), (1, 3)])
    assert routing.choose(mass((0, 3), (1, 3)), [here, there]) == 1
    assert routing.choose(mass((0, 0), (1, 3)), [here, replica("b", [(0, 3)])]) == 0


@pytest.mark.parametrize(("running", "chosen"), [(1, 1), (2, 0)])
def test_cache_aware__a_much_busier_replica_is_not_worth_it(running, chosen):
    """A quarter of a batch is borne (one of four), not half of it."""
    busy = replica("b", [(0, 3)], running=running)
    assert CacheAware(slack=0.25).choose(mass((0, 3)), [replica("a"), busy]) == chosen


def test_cache_aware__keeps_requests_of_a_kind_together_while_nothing_is_resident():
    routing, replicas = CacheAware(), [replica("a"), replica("b")]
    one, other = mass((0, 0), (1, 0)), mass((0, 3), (1, 3))
    for wanted in (one, other):
        for _ in range(3):
            chosen = routing.choose(wanted, replicas)
            routing.sent(wanted, replicas[chosen])
    places = {name: routing.choose(m, replicas) for name, m in (("one", one), ("other", other))}
    for _ in range(5):
        for name, wanted in (("one", one), ("other", other)):
            chosen = routing.choose(wanted, replicas)
            assert chosen == places[name]
            routing.sent(wanted, replicas[chosen])
    assert places["one"] != places["other"]


def test_cache_aware__knowing_nothing_goes_by_load():
    busy, idle = replica("a", [(0, 0)], running=2), replica("b")
    assert CacheAware().choose(NOTHING, [busy, idle]) == 1
