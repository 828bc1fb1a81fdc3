"""Replicas behind a router, simulated: clocks by hand, nothing lost; and what feeds the router."""

import asyncio
import json
import random

import numpy as np
import pytest

from predictors.errors import MoecastError
from predictors.token import Token
from runtime.config import SystemConfig
from runtime.policy.routing import ROUTINGS, RoundRobin
from runtime.serving.config import ROUTING_NAMES, ServeConfig
from runtime.serving.replicas.exchange import Wire, exchanged
from runtime.serving.replicas.forecasting import Forecaster, prompt_of
from runtime.sim.replicas import Limits, Request, SimulatedReplica, route
from tests.builders.traces import make_spec
from tests.unit.runtime.sim.test_cluster import Machine, Step

SPEC = make_spec(num_layers=3, num_experts=8, top_k=2)
DEMAND = SystemConfig(prefetch=False, per_layer=False)
NOTHING = np.zeros((3, 8), dtype=np.float32)


def make(*, slots=24, limits=None):
    return lambda: SimulatedReplica(
        spec=SPEC,
        system=DEMAND,
        hardware=Machine(),
        slots=slots,
        limits=limits or Limits(max_running=2, max_waiting=1),
    )


def request(arrival, experts, *, tokens=3, number=0):
    """The same experts on every layer: a prompt of one token, and so many more."""
    step = Step([[experts]] * SPEC.num_layers, [number])
    return Request(arrival, [step] * (1 + tokens), NOTHING)


def test_route__one_request_takes_what_its_steps_take():
    """A cold step: 3 layers of 10 + 6 + 6 + 1 s, the second expert fetched behind the first while
    that is computed; a warm one: 3 of 10 + 2."""
    (one,) = [request(5.0, [0, 1], tokens=2)]
    outcome = route([one], RoundRobin(), make(), num_replicas=1)
    cold, warm = 3 * (10 + 12 + 1), 3 * 12
    assert one.started == 5.0
    assert one.first_token == 5.0 + cold
    assert one.ended == 5.0 + cold + 2 * warm
    figures = outcome.as_dict()
    assert figures["ttft_seconds"] == cold
    assert figures["decode_hit_rate"] == 1.0
    assert figures["prefill_hit_rate"] == 0.0


def test_route__requests_of_one_replica_decode_together():
    """The second's prompt waits for the first's; then each step has both."""
    pair = [request(0.0, [0, 1], number=0), request(0.0, [0, 1], number=1)]
    route(pair, RoundRobin(), make(), num_replicas=1)
    assert pair[1].started == pair[0].first_token
    assert pair[0].ended == pair[1].ended
    apart = [request(0.0, [0, 1], number=0), request(0.0, [0, 1], number=1)]
    route(apart, RoundRobin(), make(), num_replicas=2)
    assert [one.started for one in apart] == [0.0, 0.0]


def test_route__full_queues_refuse_and_lose_nothing_else():
    crowd = [request(0.0, [i % 8, (i + 1) % 8], number=i) for i in range(8)]
    outcome = route(crowd, RoundRobin(), make(), num_replicas=2)
    # Two running and one waiting on each of two; nobody has begun when all come at once.
    assert outcome.num_refused == 2
    assert sum(one.ended is not None for one in crowd) == 6


@pytest.mark.parametrize("name", ROUTINGS)
def test_route__serves_every_request_once(name):
    rng = random.Random(1)
    times = sorted(rng.uniform(0, 2000) for _ in range(30))
    crowd = [
        request(at, rng.sample(range(8), 2), tokens=rng.randint(1, 4), number=i)
        for i, at in enumerate(times)
    ]
    outcome = route(
        crowd, ROUTINGS[name](), make(slots=8, limits=Limits(max_running=4, max_waiting=64)),
        num_replicas=3,
    )  # fmt: skip
    figures = outcome.as_dict()
    assert figures["served"] == 30
    assert figures["refused"] == 0
    for one in crowd:
        assert one.arrival <= one.started < one.first_token <= one.ended
    steps = sum(len(one.steps) for one in crowd)
    asked = sum(layer.requests for r in outcome.replicas for layer in (*r.prefill, *r.decode))
    assert asked <= steps * SPEC.num_layers * 2
    assert 0 < figures["hit_rate"] < 1


def test_route__by_experts_hits_more_than_in_turn():
    """Requests of two kinds that share no expert, two replicas that hold one kind each."""
    kinds = ([0, 1], [6, 7])
    rng = random.Random(3)
    hits = {}
    for name in ("round-robin", "cache-aware"):
        crowd = []
        for i in range(24):
            kind = kinds[rng.randrange(2)]
            one = request(i * 150.0, kind, tokens=2, number=i)
            one.mass_LE = NOTHING.copy()
            one.mass_LE[:, kind] = 1.0
            crowd.append(one)
        outcome = route(crowd, ROUTINGS[name](), make(slots=6), num_replicas=2)
        hits[name] = outcome.as_dict()["hit_rate"]
    assert hits["cache-aware"] > hits["round-robin"] + 0.05


# ---- what feeds the router


class Words:
    """A tokenizer: a word is its length."""

    class Encoding:
        def __init__(self, ids):
            self.ids = ids

    def encode(self, text):
        return Words.Encoding([len(word) for word in text.split()])


def test_forecaster__tells_what_a_prompt_needs():
    counts_SLE = np.zeros((2, 3, 8))
    counts_SLE[0, :, 5] = 10  # the token 3 uses expert 5, the token 4 expert 2
    counts_SLE[1, :, 2] = 10
    token = Token.from_counts(SPEC, np.array([3, 4]), counts_SLE, np.array([10, 10]))
    forecaster = Forecaster(SPEC, token, Words())
    body = json.dumps({"prompt": "the cat"}).encode()
    mass_LE = forecaster.mass("/v1/completions", body)
    assert mass_LE.argmax(axis=1).tolist() == [5, 5, 5]
    assert mass_LE[0, 5] > 1.5
    assert forecaster.mass("/v1/models", b"") is None
    assert forecaster.mass("/v1/completions", b"{") is None


def test_prompt__is_found_in_either_kind_of_request():
    def found(path, asked):
        return prompt_of(path, json.dumps(asked).encode())

    assert found("/v1/completions", {"prompt": "one"}) == "one"
    assert found("/v1/completions", {"prompt": ["one", "two"]}) == "one"
    assert found("/v1/completions", {"prompt": [1, 2]}) == ""
    parts = [{"type": "text", "text": "b"}, {"type": "image"}, 3]
    messages = [{"role": "system", "content": "a"}, {"content": parts}, 7]
    assert found("/v1/chat/completions", {"messages": messages}) == "a\nb\n"
    assert found("/v1/completions", ["no object"]) == ""
    assert found("/v1/embeddings", {"prompt": "one"}) == ""


def wire(body=b"hello"):
    return Wire(method="POST", path="/x", query=b"a=1", headers=[(b"k", b"v")], body=body)


def test_exchange__carries_a_request_and_its_answer():
    async def app(scope, receive, send):
        message = await receive()
        said = [scope["method"], scope["path"], scope["query_string"].decode()]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for part in (",".join(said).encode(), message["body"]):
            await send({"type": "http.response.body", "body": part, "more_body": True})

    async def run():
        return [message async for message in exchanged(app, wire())]

    start, *parts = asyncio.run(run())
    assert start["status"] == 200
    assert [part["body"] for part in parts] == [b"POST,/x,a=1", b"hello"]


def test_exchange__a_client_that_leaves_is_told_to_the_application():
    heard = []

    async def app(_scope, receive, send):
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        heard.append((await receive())["type"])

    async def run():
        messages = exchanged(app, wire())
        async for _ in messages:
            break
        await messages.aclose()

    asyncio.run(run())
    assert heard == ["http.disconnect"]


def test_exchange__an_application_that_fails_before_its_answer_fails_the_request():
    async def app(_scope, _receive, _send):
        raise OSError("broken")

    async def run():
        return [message async for message in exchanged(app, wire())]

    with pytest.raises(OSError, match="broken"):
        asyncio.run(run())


def test_serve__what_replicas_can_not_be_is_named():
    for given, said in (
        ({"replicas": 2}, "launcher=ray"),
        ({"cluster": "10.0.0.1:6379"}, "launcher=ray"),
        ({"launcher": "slurm"}, "unknown launcher"),
        ({"launcher": "ray", "replicas": 0}, "replicas=0"),
        ({"launcher": "ray", "port": 0}, "port=0"),
        ({"routing": "cash-aware"}, "cache-aware"),
    ):
        with pytest.raises(MoecastError, match=said):
            ServeConfig(**given)
    assert ServeConfig(launcher="ray", replicas=2).replicas == 2
    assert set(ROUTING_NAMES) == set(ROUTINGS)
