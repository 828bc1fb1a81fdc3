"""Reuse eviction: what an expert is worth before its layer's turn, after it, and unforecast."""

import numpy as np
import pytest

from runtime.policy.cache import ExpertCache
from runtime.policy.eviction.reuse import ReuseEviction
from tests.builders.arena import policy_of, random_routing, serve
from tests.unit.runtime.policy.test_device_cache import once

LAYERS, EXPERTS = 3, 4
ONE = np.array([0])


def reuse(num_slots: int = 4) -> tuple[ReuseEviction, ExpertCache]:
    policy = ReuseEviction(num_layers=LAYERS, num_experts=EXPERTS)
    cache = ExpertCache(num_slots=num_slots, num_layers=LAYERS, per_layer=False, policy=policy)
    return policy, cache


def valued(*residents, num_slots: int = 4) -> tuple[ReuseEviction, ExpertCache]:
    """After a step in which every layer was given its `VALUES` and chose its expert 0."""
    policy, cache = reuse(num_slots)
    policy.begin_step(ONE)
    for layer, value_E in enumerate(VALUES):
        policy.on_reuse_scores(layer, [value_E])
        policy.on_routed(layer, once([0]))
    policy.end_step()
    for expert in residents:
        cache.admit(expert)
    return policy, cache


def begin(cache: ExpertCache, tokens_per_expert: dict[int, int]) -> None:
    """A step in which the first layer has been valued and routed."""
    cache.policy.begin_step(ONE)
    cache.policy.on_reuse_scores(0, [VALUES[0]])
    cache.policy.on_routed(0, tokens_per_expert)


def forecast(cache: ExpertCache, layer: int, chance_E: list[float]) -> None:
    cache.policy.on_forecast(layer, chance_E, chance_E)


def next_victim(cache: ExpertCache) -> tuple[int, int]:
    """Who goes for one more expert of the last layer."""
    return cache.admit((LAYERS - 1, EXPERTS - 1))[1][0]


VALUES = [[0.5, 0.2, 0.3, 0.1], [0.4, 0.1, 0.6, 0.3], [0.2, 0.7, 0.1, 0.0]]
WORTH = [[0.6, 0.16, 0.24, 0.08], [0.52, 0.08, 0.48, 0.24], [0.36, 0.56, 0.08, 0.0]]
"""Scores of `valued()`, with 4 slots for 12 experts, .6 x 4/12 = .2: .8 of what was said, and .2
where all steps so far used the expert."""


def test_reuse__score_mixes_predictions_with_past_use() -> None:
    policy, cache = valued()
    found = [[policy.score((layer, e)) for e in range(EXPERTS)] for layer in range(LAYERS)]
    assert np.array(found) == pytest.approx(np.array(WORTH))


def test_reuse__predictions_after_the_routing_count_as_those_before_it() -> None:
    policies = before, after = [reuse()[0] for _ in range(2)]
    for step in range(3):
        for policy in policies:
            policy.begin_step(ONE)
        for layer, value_E in enumerate(np.roll(VALUES, step, axis=1)):
            before.on_reuse_scores(layer, [value_E])
            before.on_routed(layer, once([step]))
            after.on_routed(layer, once([step]))
            after.on_reuse_scores(layer, [value_E])
            experts = [(a, e) for a in range(LAYERS) for e in range(EXPERTS)]
            assert [*map(after.score, experts)] == [*map(before.score, experts)]
        for policy in policies:
            policy.end_step()


def test_reuse__forecasts_count_until_their_layer_is_routed() -> None:
    _, cache = valued((0, 1), (1, 0), (2, 1), (1, 1))
    cache.policy.begin_step(ONE)
    # Worth .9 + .1 x .08 = .91 and 0 + .52 now: (0, 1), worth .16, is the least.
    forecast(cache, 1, [0.0, 0.9, 0.0, 0.0])
    assert next_victim(cache) == (0, 1)
    cache.policy.on_reuse_scores(1, [VALUES[1]])
    cache.policy.on_routed(1, once([2]))
    # Its turn has passed: below .1 again, and a forecast that comes too late changes nothing.
    forecast(cache, 1, [0.0, 0.9, 0.0, 0.0])
    cache.remove((2, EXPERTS - 1))
    cache.admit((0, 0))
    assert next_victim(cache) == (1, 1)


def test_reuse__a_prefill_keeps_experts_of_later_layers() -> None:
    _, cache = valued((0, 0), (0, 2), (2, 0), (2, 2))
    begin(cache, {0: 20, 1: 20})
    # 40 choices among 4 experts: all of layer 2 will be needed, worth more than the .6 of (0, 0).
    assert next_victim(cache) == (0, 2)
    cache.remove((2, EXPERTS - 1))
    cache.admit((1, 0))  # needed sooner than any use of (0, 0)
    assert next_victim(cache) == (0, 0)


def test_reuse__a_prefill_expects_balanced_routing() -> None:
    policy, cache = valued()
    begin(cache, {0: 3, 1: 2})
    chance = 1 - (3 / 4) ** 5
    worth = {e: chance + (1 - chance) * WORTH[1][e] for e in range(EXPERTS)}
    # (0, 0) is worth .6, less than the least of layer 1: .763 + .237 x .08.
    assert min(worth.values()) == pytest.approx(0.7817, abs=1e-4)
    assert {e: policy.score((1, e)) for e in range(EXPERTS)} == pytest.approx(worth)
    assert policy.may_evict_for((0, 0), (1, 1))
    assert not policy.may_evict_for((1, 1), (0, 0))


def test_reuse__few_tokens_expect_no_balanced_routing() -> None:
    """Their later layers are worth what they are valued at: of a few requests' tokens, the values
    say more than balanced routing does."""
    policy, cache = valued(num_slots=2)
    begin(cache, {0: 2, 1: 2})
    assert policy.may_evict_for((1, 1), (0, 0))
    assert not policy.may_evict_for((0, 0), (1, 1))


def test_reuse__prefetches_evict_only_lower_scores() -> None:
    _, cache = valued((1, 0), num_slots=1)
    cache.policy.begin_step(ONE)
    forecast(cache, 2, [0.3, 0.0, 0.0, 0.0])  # .3 + .7 x .24 = .47
    forecast(cache, 1, [0.1, 0.0, 0.0, 0.0])  # .1 + .9 x .43 = .49
    assert cache.admit((2, 0), prefetch=True) == (None, None)
    assert None not in cache.admit((2, 0))


def test_reuse__idle_candidate_is_the_best_absent_expert() -> None:
    _, cache = valued()
    for expert in [(0, 0), (2, 1), (1, 0)]:
        assert cache.policy.next_idle_candidate() == expert
        if expert != (1, 0):
            cache.admit(expert)
    cache.policy.begin_step(ONE)
    forecast(cache, 1, [0.0, 0.0, 1.0, 0.0])
    assert cache.policy.next_idle_candidate() == (2, 0)  # layer 1 is the forecast's affair now
    cache.policy.on_routed(0, {0: 9, 1: 9})
    assert cache.policy.next_idle_candidate() is None  # a prompt


def test_reuse__leaves_an_idle_link_idle_without_predictions() -> None:
    policy, cache = valued()
    assert policy.next_idle_candidate() is not None
    for layer in range(LAYERS):
        cache.policy.on_routed(layer, once([0]))
    assert policy.next_idle_candidate() is None


def test_reuse__without_a_predictor_equals_regret() -> None:
    """On an arena that each layer has a share of."""
    routing = random_routing(1, steps=300, layers=2, experts=12, top_k=2)
    policies = (policy_of(name, experts=12) for name in ("reuse", "regret"))
    reuse, regret = (serve(one, routing, slots=8, per_layer=True) for one in policies)
    assert sum(map(len, reuse)) > 100
    assert reuse == regret


def test_reuse__scores_do_not_depend_on_when_they_are_read() -> None:
    """They are computed when an expert is evicted: reading them after every event changes none."""
    policies = [reuse()[0] for _ in range(2)]
    for step in range(40):
        rng = np.random.default_rng(step)
        events: list[tuple] = [("begin_step", ONE)]
        for layer in range(LAYERS):
            chances = [rng.random(EXPERTS) for _ in range(layer, LAYERS)]
            ahead = [("on_forecast", at, p, p) for at, p in enumerate(chances, start=layer)]
            chosen = {int(e): int(rng.integers(1, 4)) for e in rng.permutation(EXPERTS)[:2]}
            events += [*ahead, ("on_reuse_scores", layer, rng.random((1, EXPERTS)))]
            events += [("on_routed", layer, chosen), *ahead[: step % 3]]
        for event, *arguments in events:
            for policy in policies:
                getattr(policy, event)(*arguments)
            policies[0].scores()
            policies[0].compute_idle_scores()
        read, unread = ([p.scores().tolist(), p.compute_idle_scores().tolist()] for p in policies)
        assert read == unread
        for policy in policies:
            policy.end_step()


class ValuedEviction(ReuseEviction):
    """Gets the same values for its only layer before each routing."""

    def __init__(self, value_E):
        super().__init__(num_layers=1, num_experts=len(value_E))
        self._given_1E = [value_E]

    def on_tokens_routed(self, layer, experts_TK):
        self.on_reuse_scores(layer, self._given_1E)


@pytest.mark.parametrize("is_right", [True, False])
def test_reuse__stops_trusting_a_predictor_that_hits_less(is_right: bool) -> None:
    """Two experts are used in turn, the others now and then. One forecaster says so, one the
    opposite: that one is left, and counting keeps the two."""
    rng, value_E = np.random.default_rng(2), np.full(12, 0.1)
    value_E[:2] = 0.9 if is_right else 0.0
    others = [rng.choice(np.arange(2, 12), 2, replace=False).tolist() for _ in range(200)]
    routing = [[sorted([step % 2, *chosen])] for step, chosen in enumerate(others)]
    policy = ValuedEviction(value_E)
    missed = serve(policy, routing, slots=4, per_layer=False)
    assert policy.trusts_predictor is is_right
    assert sum(map(len, missed[100:])) <= 300 - 95
