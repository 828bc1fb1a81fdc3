"""Steps of replays: which tokens of requests share one, what it shows, and its routing."""

import numpy as np
import pytest

from predictors.base import Signal
from predictors.errors import MoecastError
from runtime.policy.device_cache import count_tokens
from runtime.sim.step import ArrayStep, RecordedRouting, batch_steps
from tests.builders.entries import tiny_spec
from tests.builders.simulated import routed_step

SPEC = tiny_spec(num_layers=3, hidden_size=1)


def step(number, *tokens):
    """A step of a request on two layers; its signals differ from each other, token and layer."""
    token_T = np.array(tokens)
    states = {
        (signal, layer): 10**i * token_T[:, None] + layer
        for i, signal in enumerate((Signal.LAYER_INPUT, Signal.GATE_INPUT, Signal.LOGITS))
        for layer in (0, 1)
    }
    experts = [2 * token_T[:, None] + layer for layer in (0, 1)]
    return ArrayStep(token_T, np.full(len(tokens), number), experts, states)


def request(number, num_decodes):
    return [step(number, 7, 8), *(step(number, 100 * number + i) for i in range(num_decodes))]


def shown(steps):
    return [(step.requests_T.tolist(), step.tokens_T.tolist()) for step in steps]


def test_batch_steps__the_next_request_replaces_an_ended_one():
    steps = [*request(0, 1), *request(1, 3), *request(2, 2), *request(3, 1)]
    assert shown(batch_steps(steps, 2)) == [
        ([0, 0], [7, 8]), ([1, 1], [7, 8]), ([0, 1], [0, 100]), ([2, 2], [7, 8]),
        ([1, 2], [101, 200]), ([1, 2], [102, 201]), ([3, 3], [7, 8]),
    ]  # fmt: skip


def test_batch_steps__every_signal_stands_row_below_row():
    first, second = step(0, 3), step(1, 5)
    (both,) = batch_steps([first, second], 2)
    for layer in (0, 1):
        for signal in ("layer_input", "gate_input", "logits", "experts"):
            expected = [getattr(one, signal)(layer)[0].tolist() for one in (first, second)]
            assert getattr(both, signal)(layer).tolist() == expected


def test_batch_steps__one_request_at_a_time_is_the_trace_itself():
    steps = [*request(0, 2), *request(1, 2)]
    assert list(batch_steps(steps, 1)) == steps


def test_batch_steps__requests_that_generated_nothing_take_no_place():
    steps = [*request(0, 0), *request(1, 1), *request(2, 1)]
    assert shown(batch_steps(steps, 2))[-1] == ([1, 2], [100, 200])


@pytest.mark.parametrize("size", [0, 3])
def test_batch_steps__sizes_that_cannot_be_filled_are_refused(size):
    with pytest.raises(MoecastError, match=f"batch size {size}"):
        list(batch_steps([*request(0, 5), *request(1, 5)], size))


def test_batch_steps__no_more_is_read_than_the_batch_needs():
    read = []

    def steps():
        for number in range(10):
            read.append(number)
            yield from request(number, 4)

    batches = batch_steps(steps(), 2)
    for _ in range(3):
        next(batches)
    # The third request's first step ends the second request, as only a look at it can tell.
    assert max(read) == 2


# ---- routing, against numpy's own sets


@pytest.fixture
def steps():
    rng = np.random.default_rng(0)
    sizes = [(SPEC.num_layers, num_tokens, SPEC.top_k) for num_tokens in (1, 5, 1, 2, 9, 1)]
    # 8 stands for a choice of none.
    return [routed_step(rng.integers(0, 9, size)) for size in sizes]


def test_routing__is_each_step_s_set_of_experts(steps):
    found = RecordedRouting(iter(steps), SPEC)
    layers = [step.experts_LTK for step in steps]
    expected = [[np.unique(one[one < 8]).tolist() for one in each] for each in layers]
    assert [list(found), list(found)] == [expected, expected], "once more, too"


def test_count_tokens__counts_tokens_in_ascending_order(steps):
    for step in (step for step in steps if step.experts_LTK.shape[1] > 1):
        for layer in step.experts_LTK:
            ids, counts = np.unique(layer[layer < 8], return_counts=True)
            found = count_tokens(layer, 8)
            assert list(found.items()) == list(zip(ids.tolist(), counts.tolist(), strict=True))


def test_count_tokens__one_token_has_each_of_its_experts_once():
    assert count_tokens(np.array([[5, 8, 2]]), 8) == {2: 1, 5: 1}
