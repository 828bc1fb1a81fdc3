"""What a replay tells the eviction policy, and what it keeps from all but Belady."""

import numpy as np
import pytest

from runtime.config import SystemConfig
from runtime.policy.eviction.past_use import LruEviction
from runtime.sim.replay import replay
from tests.builders.arena import policy_of, random_routing, serve
from tests.builders.entries import tiny_spec
from tests.builders.simulated import Knows, routed_step, toy_machine

SPEC = tiny_spec(num_layers=2, num_experts=8, top_k=2)


class Spy(LruEviction):
    def __init__(self):
        super().__init__(num_layers=2, num_experts=8)
        self.events = []

    def begin_step(self, requests_T) -> None:
        self.events.append(("begin", requests_T.tolist()))

    def on_tokens_routed(self, layer: int, experts_TK) -> None:
        self.events.append(("tokens", layer, experts_TK.tolist()))

    def on_routed(self, layer, tokens_per_expert) -> None:
        self.events.append((layer, dict(tokens_per_expert)))

    def on_forecast(self, layer, probability_E, order_E) -> None:
        self.events.append(("forecast", layer, np.round(probability_E, 3).tolist()))

    def end_step(self) -> None:
        self.events.append("end")


def run(steps, predictor=None, **options):
    system, hardware = SystemConfig(prefetch=predictor is not None, **options), toy_machine()
    return replay(steps, predictor, spec=SPEC, system=system, hardware=hardware, budget_slots=8)


def test_replay__the_policy_sees_each_event_once_and_in_order(monkeypatch):
    spy = Spy()
    monkeypatch.setattr("runtime.policy.build.make_eviction_policy", lambda *_, **__: spy)
    prefill = routed_step([[[0, 1], [1, 2]], [[4, 5], [4, 5]]], 7)
    decodes = [routed_step([[[0, 3]], [[6, 5]]], request) for request in (7, 8)]
    run([prefill, *decodes], Knows(SPEC, 3, chance=0.5))
    chance, both = ([0.0] * 3 + [share] + [0.0] * 4 for share in (0.5, 0.75))
    decode = [
        *[("tokens", 0, [[0, 3]]), (0, {0: 1, 3: 1}), ("forecast", 1, chance)],
        *[("tokens", 1, [[6, 5]]), (1, {5: 1, 6: 1}), "end"],
    ]
    assert spy.events == [
        *[("begin", [7, 7]), ("tokens", 0, [[0, 1], [1, 2]]), (0, {0: 1, 1: 2, 2: 1})],
        *[("forecast", 1, both), ("tokens", 1, [[4, 5], [4, 5]]), (1, {4: 2, 5: 2}), "end"],
        *[("begin", [7]), *decode, ("begin", [8]), *decode],
    ]


ROUTING = random_routing(3, steps=80, layers=2, experts=8, top_k=2)
STEPS = [routed_step([[layer] for layer in layers]) for layers in ROUTING]


@pytest.mark.parametrize("per_layer", [True, False])
def test_replay__misses_what_the_cache_alone_misses(per_layer):
    missed = serve(policy_of("lru", experts=8), ROUTING, slots=8, per_layer=per_layer)
    assert run(STEPS, eviction="lru", per_layer=per_layer).total.misses == sum(map(len, missed))


def test_replay__belady_knows_the_future_of_an_iterator():
    best, usual = run(iter(STEPS), eviction="belady").total, run(STEPS).total
    assert best.requests == usual.requests == 320
    assert best.misses < 0.9 * usual.misses
