"""Each policy against a slow plain version of it, or against every possible run."""

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.policy.eviction.base import Expert
from tests.builders.arena import Routing, policy_of, random_routing, serve

SHAPE = {"layers": 3, "experts": 8}
History = list[Expert]
"""Every access in order, admissions included."""


def misses_of(routing: Routing, *, slots: int, per_layer: bool, choose) -> list:
    """Serves the routing from plain lists; `choose` gets the candidates in order of admission."""
    history: History = []
    resident: list[Expert] = []
    missed = []
    for layers in routing:
        missing = []
        for layer, chosen in enumerate(layers):
            wanted = [(layer, e) for e in chosen]
            absent = [expert for expert in wanted if expert not in resident]
            history += [expert for expert in wanted if expert in resident]
            for expert in absent:
                share = [e for e in resident if not per_layer or e[0] == layer]
                if len(share) == (slots // len(layers) if per_layer else slots):
                    resident.remove(choose([e for e in share if e not in wanted], history))
                resident.append(expert)
                history.append(expert)
            missing += absent
        missed.append(missing)
    return missed


def last_access(expert: Expert, history: History) -> int:
    return max(i for i, accessed in enumerate(history) if accessed == expert)


def oldest(candidates: list[Expert], history: History) -> Expert:
    return min(candidates, key=lambda e: last_access(e, history))


def rarest(candidates: list[Expert], history: History) -> Expert:
    return min(candidates, key=lambda e: (history.count(e), last_access(e, history)))


def lonely(candidates: list[Expert], history: History) -> Expert:
    """LRU in which an access counts for the neighbours too, the expert itself coming last."""

    def touched(expert: Expert) -> tuple[int, int]:
        layer, e = expert
        near = {(layer, e): 2, (layer, e - 1): 1, (layer, e + 1): 0}
        return max((i, near[accessed]) for i, accessed in enumerate(history) if accessed in near)

    return min(candidates, key=touched)


REFERENCES = {"lru": oldest, "lfu": rarest, "neighbour": lonely}


@pytest.mark.parametrize("per_layer", [True, False])
@pytest.mark.parametrize("name", REFERENCES)
def test_policy__misses_what_its_plain_version_misses(name, per_layer):
    for seed in range(3):
        routing = random_routing(seed, steps=60, **SHAPE, top_k=2, turn=15)
        policy = policy_of(name, **SHAPE)
        expected = misses_of(routing, slots=12, per_layer=per_layer, choose=REFERENCES[name])
        assert sum(map(len, expected)) > 50
        assert serve(policy, routing, slots=12, per_layer=per_layer) == expected


def fewest_misses(routing: Routing, *, slots: int) -> int:
    """Fewest misses of all runs that fetch on request only, by trying every set of kept experts."""
    costs: dict[frozenset[Expert], int] = {frozenset(): 0}
    for layers in routing:
        for layer, chosen in enumerate(layers):
            wanted = frozenset((layer, e) for e in chosen)
            after: dict[frozenset[Expert], int] = {}
            for resident, cost in costs.items():
                new = cost + len(wanted - resident)
                others = sorted(resident - wanted)
                for kept in combinations(others, min(len(others), slots - len(wanted))):
                    state = wanted | frozenset(kept)
                    after[state] = min(after.get(state, new), new)
            costs = after
    return min(costs.values())


@st.composite
def routings(draw, layers: int, experts: int) -> Routing:
    chosen = st.sets(st.integers(0, experts - 1), min_size=1, max_size=2).map(sorted)
    step = st.lists(chosen, min_size=layers, max_size=layers)
    return draw(st.lists(step, min_size=1, max_size=16 // layers))


@settings(max_examples=115, deadline=None)
@given(shape=st.sampled_from([(1, 6), (2, 4)]), slots=st.integers(2, 5), data=st.data())
def test_belady__no_run_misses_less(shape, slots, data):
    """Not even where layers share the arena."""
    routing = data.draw(routings(*shape))
    policy = policy_of("belady", *shape, future=routing)
    missed = serve(policy, routing, slots=slots, per_layer=False)
    assert sum(map(len, missed)) == fewest_misses(routing, slots=slots)
