"""Each paper's formula and rules on cases worked out by hand."""

import numpy as np
import pytest

from predictors.errors import MoecastError
from runtime.policy.eviction.base import EvictionPolicy, Expert
from runtime.policy.eviction.registry import make_eviction_policy
from tests.builders.arena import policy_of


def fill(policy: EvictionPolicy, residents: list[Expert], *, layers: int = 2) -> None:
    """Shares the slots among all layers, and admits the residents in this order."""
    policy.divide([(len(residents), range(layers))])
    for expert in residents:
        policy.on_admit(expert)


def victim_of(policy: EvictionPolicy, is_evictable=lambda _: True) -> Expert | None:
    return policy.choose_victim(0, is_evictable)


def leaving(policy: EvictionPolicy, *, stay=()) -> list[Expert]:
    """The order in which residents are dropped, but those that stay."""
    evicted = []
    while (victim := victim_of(policy, lambda expert: expert not in stay)) is not None:
        policy.on_remove(victim)
        evicted.append(victim)
    return evicted


ONE = np.array([0])
"""A step with one token, of request 0."""


def route(policy: EvictionPolicy, layer: int, tokens: dict[int, int]) -> None:
    """One request's routing of a layer."""
    policy.on_tokens_routed(layer, np.repeat(list(tokens), list(tokens.values()))[:, None])
    policy.on_routed(layer, tokens)


def step(policy: EvictionPolicy, *layers: dict[int, int], request: int = 0) -> None:
    policy.begin_step(np.full(sum(layers[0].values()) if layers else 1, request))
    for layer, tokens in enumerate(layers):
        route(policy, layer, tokens)
    policy.end_step()


ABC = [(0, 0), (0, 1), (0, 2)]


def test_lru__uses_and_predictions_are_accesses():
    policy = policy_of("lru")
    fill(policy, ABC)
    policy.on_use((0, 0))
    policy.on_predict((0, 1))
    assert leaving(policy) == [(0, 2), (0, 0), (0, 1)]


def test_score_order__finds_the_one_evictable_expert():
    policy = policy_of("lfu", experts=64)
    everyone = [(0, e) for e in range(64)]
    step(policy, {e: 1 for e in range(32, 64)}, {})
    fill(policy, everyone)
    assert leaving(policy, stay=everyone[:31]) == everyone[31:]


def test_static__keeps_the_given_set_and_streams_the_rest():
    policy = policy_of("static", counts=[[5, 0, 9, 0], [0, 7, 0, 0]], buffers=2)
    fill(policy, [(0, 2), (1, 3), (0, 0), (1, 0), (1, 1)])
    policy.on_use((1, 3))
    # Three of the five slots are fixed: (0, 2), (1, 1), (0, 0); all others are LRU.
    assert victim_of(policy) == (1, 0)
    assert victim_of(policy, lambda expert: expert != (1, 0)) == (1, 3)
    assert victim_of(policy, lambda expert: expert[0] == 0) == (0, 0)


def test_static__learns_its_set_when_it_is_given_none():
    policy = policy_of("static", warmup_steps=3, buffers=1)
    fill(policy, [(0, 3), (1, 1)])
    for _ in range(2):
        step(policy, {3: 1}, {1: 1})
        assert victim_of(policy) == (0, 3), "LRU while it learns"
    step(policy, {3: 1}, {2: 1})
    assert victim_of(policy) == (1, 1)
    for _ in range(9):
        step(policy, {0: 1}, {1: 1})
    assert victim_of(policy) == (1, 1), "the set is fixed for good"


def test_moe_infinity_sequence__ratio_times_layer_decay():
    policy = policy_of("moe-infinity-sequence")
    step(policy, {0: 6, 1: 2}, {0: 5, 2: 3})
    fill(policy, [(0, 0), (0, 1), (0, 3), (1, 0), (1, 2), (1, 3)])
    # Layer 0 (decay 1): 6/8, 2/8, 0. Layer 1 (decay 1/2): 5/16, 3/16, 0. Zeros by decay alone.
    assert leaving(policy) == [(1, 3), (0, 3), (1, 2), (0, 1), (1, 0), (0, 0)]


def test_moe_infinity_sequence__counts_at_once_and_per_sequence():
    policy = policy_of("moe-infinity-sequence")
    fill(policy, [(0, 0), (0, 1)])
    policy.begin_step(ONE)
    route(policy, 0, {0: 1})
    assert victim_of(policy) == (0, 1), "at once, not when the step ends"
    policy.end_step()
    step(policy, {1: 1}, request=1)
    assert victim_of(policy) == (0, 0), "the new sequence's matrix is empty"
    policy.begin_step(ONE)
    assert victim_of(policy) == (0, 1), "sequence 0 goes on with its own"


@pytest.mark.parametrize("name", ["moe-infinity-sequence", "moe-infinity-request"])
def test_moe_infinity__requests_of_one_step_are_told_apart(name):
    policy = policy_of(name, layers=1)
    fill(policy, [(0, 0), (0, 1), (0, 2)], layers=1)
    policy.begin_step(np.array([3, 3, 3, 5]))
    route(policy, 0, {0: 2, 1: 1, 2: 1})
    policy.end_step()
    policy.begin_step(np.array([3, 5]))
    # Ratios (2/3, 1/3, 0) and (0, 0, 1); counts (2, 1, 0) and (0, 0, 1).
    both = {"moe-infinity-sequence": [1, 0, 2], "moe-infinity-request": [1, 2, 0]}[name]
    fill(policy, [(0, 0), (0, 1), (0, 2)], layers=1)
    assert leaving(policy) == [(0, e) for e in both]
    policy.begin_step(np.array([5]))
    fill(policy, [(0, 0), (0, 1), (0, 2)], layers=1)
    assert leaving(policy) == [(0, 0), (0, 1), (0, 2)]


def test_moe_infinity_request__counts_ended_iterations():
    policy = policy_of("moe-infinity-request")
    step(policy, {0: 3, 1: 1}, {0: 3, 1: 1})
    residents = [(1, 0), (1, 1), (0, 0), (0, 1)]
    fill(policy, residents)
    policy.begin_step(np.zeros(5, np.int64))
    route(policy, 0, {1: 5})
    # (3 1) and (3 1) x 1/2; the five tokens of the running iteration do not count yet.
    assert leaving(policy) == [(1, 1), (0, 1), (1, 0), (0, 0)]
    policy.end_step()
    policy.begin_step(ONE)
    fill(policy, residents)
    assert leaving(policy)[-2:] == [(0, 0), (0, 1)], "1 + 5 > 3"


@pytest.mark.parametrize("name", ["moe-infinity-sequence", "moe-infinity-request"])
def test_moe_infinity__protects_prefetches_until_routing(name):
    policy = policy_of(name)
    step(policy, {0: 9}, {0: 9})
    fill(policy, [(0, 0), (1, 2), (1, 3)])
    policy.begin_step(ONE)
    route(policy, 0, {0: 1})
    for expert in [(1, 2), (1, 3)]:
        policy.on_prefetch(expert)
    # (0, 0) has 9 tokens, but the others await layer 1.
    assert victim_of(policy) == (0, 0)
    route(policy, 1, {2: 1})
    assert victim_of(policy) == (1, 3), "not chosen: back to its score"
    assert leaving(policy, stay=[(1, 3)]) == [(0, 0), (1, 2)], "chosen, but not requested yet"
    fill(policy, [(1, 2), (0, 1)])
    policy.on_prefetch((1, 2))
    policy.on_prefetch((0, 1))
    policy.on_use((1, 2))
    assert leaving(policy) == [(1, 2), (0, 1)], "used: its own score, while (0, 1) is awaited"


def test_moe_infinity_request__newer_forecasts_end_protection():
    policy = policy_of("moe-infinity-request", layers=1)
    policy.divide([(2, range(1))])
    policy.begin_step(ONE)
    even = [1.0] * 4  # chances are capped at 1, the paper's priorities are not
    policy.on_forecast(0, even, [0.9, 0.8, 0.1, 0.0])
    for expert in [(0, 0), (0, 1)]:
        policy.on_admit(expert)
        policy.on_prefetch(expert)
    policy.on_forecast(0, even, [0.1, 0.8, 0.9, 0.0])
    policy.on_predict((0, 0))
    # Two slots: 2 and 1 are wanted now, 0 is not, though it was touched last.
    assert victim_of(policy) == (0, 0)


def test_fmoe__probability_times_visits_in_the_cache():
    policy = policy_of("fmoe", layers=1)
    fill(policy, [(0, 0), (0, 1), (0, 2)], layers=1)
    for expert in [(0, 0), (0, 1), (0, 0), (0, 1), (0, 0)]:
        policy.on_use(expert)
    # Before any map: frequencies 4, 3, 1, the fetch included.
    assert victim_of(policy) == (0, 2)
    policy.on_forecast(0, [0.25, 0.5, 0.75, 0.0], [1.0] * 4)
    # 1/(p freq): 4 x .25 = 1, 3 x .5 = 1.5, 1 x .75 = .75.
    assert leaving(policy) == [(0, 2), (0, 0), (0, 1)]


def test_fmoe__an_evicted_expert_is_counted_anew():
    policy = policy_of("fmoe", layers=1)
    fill(policy, [(0, 0), (0, 1)], layers=1)
    for expert in [(0, 0), (0, 0), (0, 0), (0, 1)]:
        policy.on_use(expert)
    policy.on_remove((0, 0))
    policy.on_admit((0, 0))
    assert victim_of(policy) == (0, 0)


def test_belady__knows_the_uses_of_the_next_steps_only():
    future = [[[0]], [[1]], [[2]], [[3]], [[0]]]
    policy = policy_of("belady", layers=1, future=future, known_steps=2)
    fill(policy, [(0, 0), (0, 1), (0, 2), (0, 3)], layers=1)
    step(policy, {0: 1})
    # After step 0, only the use of 1 is known; of the others, 0 was used and the oldest goes first.
    assert leaving(policy) == [(0, 2), (0, 3), (0, 0), (0, 1)]
    policy.on_admit((0, 1))
    policy.begin_step(ONE)
    assert policy.next_idle_candidate() == (0, 2), "known from now on; 3 and 0 are not"
    policy.on_admit((0, 2))
    assert policy.next_idle_candidate() is None
    assert policy.may_evict_for((0, 0), (0, 2))
    assert not policy.may_evict_for((0, 2), (0, 0))


REFUSED = [
    ("lruu", {}, r"'lruu'.*Did you mean 'lru'"),
    ("?", {}, "first-layers, fmoe.*regret, reuse, static"),
    ("static", {"count": 3}, r"option of static.*'count'.*buffers, counts, warmup"),
    ("static", {"counts": [[1, 2, 3, 4]]}, r"counts are \(1, 4\).*2 layers of 4 experts"),
    ("lfu", {"num_layers": 3}, "option of lfu eviction 'num_layers'"),
    ("belady", {"future": [], "known_steps": 0}, "known_steps=0: must be at least 1"),
    ("belady", {}, "for replays of a trace.*lfu, lru"),
]


@pytest.mark.parametrize(("name", "options", "message"), REFUSED)
def test_eviction_policy__what_cannot_be_made_is_refused(name, options, message):
    with pytest.raises(MoecastError, match=message):
        make_eviction_policy(name, num_layers=2, num_experts=4, options=options)


def test_first_layers__keep_all_but_a_layer_and_the_next_ones_hot_experts():
    policy = make_eviction_policy("first-layers", num_layers=2, num_experts=8, top_k=2)
    policy.divide([(12, range(2))])
    # 8 + 2 buffers leave two slots for good: those of the first layer's first experts.
    experts = [(layer, e) for layer in range(2) for e in range(8)]
    assert [*filter(policy.is_permanent, experts)] == [(0, 0), (0, 1)]
    # A step of one token needs 2 + 2 buffers, one of more than 3 all again.
    for num_tokens, num_permanent in ((1, 8), (2, 6), (40, 2)):
        policy.begin_step(np.zeros(num_tokens, dtype=np.int64))
        assert [*filter(policy.is_permanent, experts)] == experts[:num_permanent]
    few = make_eviction_policy("first-layers", num_layers=2, num_experts=8, top_k=4)
    few.divide([(12, range(2))])
    assert not few.is_permanent((0, 0))


def test_lfu__an_evicted_expert_starts_again_from_zero():
    policy = policy_of("lfu", layers=1, reset_on_eviction=True)
    fill(policy, ABC, layers=1)
    for chosen in ({0: 1}, {0: 1}, {1: 1}, {2: 1}, {2: 1}):
        step(policy, chosen)
    policy.on_remove((0, 0))
    policy.on_admit((0, 0))
    assert leaving(policy) == [(0, 0), (0, 1), (0, 2)]
