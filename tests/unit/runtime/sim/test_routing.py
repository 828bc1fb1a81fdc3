"""What replays know of a trace's routing, against numpy's own sets."""

import numpy as np
import pytest

from runtime.sim.routing import RecordedRouting, count_tokens
from tests.builders.entries import tiny_spec

SPEC = tiny_spec(num_layers=3, hidden_size=1)


class Step:
    def __init__(self, rng, num_tokens):
        # 8 stands for a choice of none.
        self.chosen = rng.integers(0, 9, size=(SPEC.num_layers, num_tokens, SPEC.top_k))

    def experts(self, layer):
        return self.chosen[layer]


@pytest.fixture
def steps():
    rng = np.random.default_rng(0)
    return [Step(rng, num_tokens) for num_tokens in (1, 5, 1, 2, 9, 1)]


def test_routing__is_each_step_s_set_of_experts(steps):
    found = RecordedRouting(iter(steps), SPEC)
    expected = [
        [sorted({int(e) for e in np.unique(layer)} - {8}) for layer in step.chosen]
        for step in steps
    ]
    assert list(found) == expected
    assert list(found) == expected  # once more


def test_count_tokens__counts_tokens_in_ascending_order(steps):
    for step in steps:
        if len(step.chosen[0]) == 1:
            continue
        for layer in step.chosen:
            ids, counts = np.unique(layer[layer < 8], return_counts=True)
            found = count_tokens(layer, 8)
            assert list(found.items()) == list(zip(ids.tolist(), counts.tolist(), strict=True))


def test_count_tokens__one_token_has_each_of_its_experts_once():
    assert count_tokens(np.array([[5, 8, 2]]), 8) == {2: 1, 5: 1}
