"""Policies that choose among scores while they serve, by what each would have hit."""

import numpy as np
import pytest

from runtime.policy.eviction.base import EvictionPolicy
from runtime.policy.eviction.regret import BLENDED, DECAYS, RegretEviction, UseShares
from tests.builders.arena import policy_of, random_routing, serve


def stable(steps: int) -> list:
    """Six favourites, two in every step by turns; the other 26 once in a while."""
    routing = []
    for step in range(steps):
        favourite, rare = step % 3 * 2, 6 + step * 2 % 26
        routing.append([[favourite, favourite + 1, rare, rare + 1]])
    return routing


def drifting(steps: int) -> list:
    """What was popular does not come back for long: recency is all."""
    return [[sorted((step // 4 + i) % 32 for i in (0, 1, 3, 6))] for step in range(steps)]


class FadingEviction(EvictionPolicy):
    """LFU whose counts decay."""

    def __init__(self, decay):
        super().__init__(num_layers=1, num_experts=32)
        self._decay = decay

    def begin_step(self, requests_T):
        self.score_LE[:] *= self._decay

    def on_routed(self, layer, tokens_per_expert):
        self.score_LE[layer, list(tokens_per_expert)] += 1.0


def test_regret__misses_hardly_more_than_the_best_arm():
    """Of LRU, LFU and decays between, on routing that favours either, and after a change."""

    def misses(policy, routing):
        return sum(map(len, serve(policy, routing, slots=8, per_layer=True)))

    for routing in (drifting(800), stable(800), stable(800) + drifting(800)):
        arms = [misses(FadingEviction(decay), routing) for decay in DECAYS]
        found = misses(policy_of("regret", layers=1, experts=32), routing)
        assert found <= min(arms) + 0.1 * (max(arms) - min(arms))


def test_regret__follows_an_arm_only_if_it_surely_hits_more():
    def arm_after(*routings):
        policy = policy_of("regret", layers=1, experts=32)
        for routing in routings:
            serve(policy, routing, slots=8, per_layer=True)
        return policy.arm

    assert arm_after(random_routing(3, steps=300, layers=1, experts=32, top_k=4)) == "blend"
    assert arm_after(stable(400)) == "lfu"
    assert arm_after(stable(400), drifting(1600)) in ("lru", "lfru")


def test_discount__is_the_time_until_the_layer_comes():
    policy = RegretEviction(num_layers=4, num_experts=2)
    one_step = np.zeros(1, np.int64)
    policy.begin_step(one_step)
    for layer, chosen in enumerate(({0: 1}, {0: 1}, {}, {0: 1})):
        policy.on_routed(layer, chosen)
    policy.begin_step(one_step)
    for layer in range(2):
        policy.on_routed(layer, {})
    # Behind layer 1: layer 2 is next, then 3, 0 and 1.
    share = sum(weight * decay / (decay + 1) for decay, weight in BLENDED.items())
    policy.scores()
    used_L, never_L = policy.score_LE.T
    expected_L = [1 / (1 / share + 2 / 4), 1 / (1 / share + 3 / 4), 0.0, 1 / (1 + 1 / 4)]
    assert used_L == pytest.approx(expected_L, abs=1e-5)
    assert never_L[2] > never_L[3] > never_L[0] > never_L[1] > 0


DECAYED = [
    # (2/8)/4 + 1, 1/4, (4/8)/4, 1/2 of 1.75.
    ([{0: 2, 1: 8, 2: 4}, {3: 1}, {0: 1}], np.array([1.0625, 0.25, 0.125, 0.5]) / 1.75),
    # Numbers might overflow.
    ([{step % 2: 1} for step in range(1_000)], np.array([1 / 3, 2 / 3, 0.0, 0.0])),
]


@pytest.mark.parametrize(("steps", "expected_E"), DECAYED, ids=["short", "long"])
def test_use_shares__weight_experts_by_their_tokens(steps, expected_E):
    shares, share_E = UseShares(num_layers=1, num_experts=4), np.empty(4)
    for tokens in steps:
        shares.begin_step()
        shares.on_routed(0, tokens)
    shares.write_decayed(0, 0.5, share_E)
    assert share_E == pytest.approx(expected_E)


def test_use_shares__are_decayed_shares_of_steps():
    shares, found_E = UseShares(num_layers=1, num_experts=3), np.empty(3)
    for chosen in ([0], [0, 1], [1]):
        shares.begin_step()
        shares.on_routed(0, dict.fromkeys(chosen, 1))
        shares.end_step()
    # At a decay of .5, the weights of the three steps are .25, .5 and 1 of 1.75.
    share_E = {d: np.array([d**2 + d, d + 1, 0]) / (d**2 + d + 1) for d in (0.5, 0.9, 0.98, 1.0)}
    for decay, expected_E in share_E.items():
        shares.write_decayed(0, decay, found_E)
        assert found_E == pytest.approx(expected_E)
    shares.write_layer(0, found_E)
    assert found_E == pytest.approx(0.2 * share_E[0.5] + 0.3 * share_E[0.9] + 0.5 * share_E[0.98])
