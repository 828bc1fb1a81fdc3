"""Batches of requests for replays: which tokens share a step, and what such a step shows."""

from dataclasses import dataclass

import numpy as np
import pytest

from predictors.errors import MoecastError
from runtime.sim.step import batch_steps


@dataclass(frozen=True)
class Step:
    request: int
    tokens: tuple[int, ...]

    @property
    def tokens_T(self):
        return np.array(self.tokens)

    @property
    def requests_T(self):
        return np.full(len(self.tokens), self.request)

    def layer_input(self, layer):
        return np.array(self.tokens, dtype=np.float32)[:, None] + layer

    def gate_input(self, layer):
        return 10 * self.layer_input(layer)

    def logits(self, layer):
        return 100 * self.layer_input(layer)

    def experts(self, layer):
        return np.array(self.tokens)[:, None] * 2 + layer


def request(number, num_decodes, *, prompt=(7, 8)):
    steps = [Step(number, prompt)] if prompt else []
    return [*steps, *(Step(number, (100 * number + i,)) for i in range(num_decodes))]


def shown(steps):
    return [(step.requests_T.tolist(), step.tokens_T.tolist()) for step in steps]


def test_batch_steps__the_next_request_replaces_an_ended_one():
    steps = [*request(0, 1), *request(1, 3), *request(2, 2), *request(3, 1)]
    assert shown(batch_steps(steps, 2)) == [
        ([0, 0], [7, 8]),
        ([1, 1], [7, 8]),
        ([0, 1], [0, 100]),
        ([2, 2], [7, 8]),
        ([1, 2], [101, 200]),
        ([1, 2], [102, 201]),
        ([3, 3], [7, 8]),
    ]


def test_batch_steps__every_signal_stands_row_below_row():
    first, second = Step(0, (3,)), Step(1, (5,))
    (step,) = batch_steps([first, second], 2)
    for layer in (0, 1):
        for signal in ("layer_input", "gate_input", "logits", "experts"):
            expected = [getattr(one, signal)(layer)[0].tolist() for one in (first, second)]
            assert getattr(step, signal)(layer).tolist() == expected


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
