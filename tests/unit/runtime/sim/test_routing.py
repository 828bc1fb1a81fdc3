"""What replays know of a trace's routing, against numpy's own sets."""

import numpy as np
import pytest

from runtime.policy.device_cache import count_tokens
from runtime.sim.step import RecordedRouting
from tests.builders.entries import tiny_spec
from tests.builders.simulated import routed_step

SPEC = tiny_spec(num_layers=3, hidden_size=1)


@pytest.fixture
def steps():
    rng = np.random.default_rng(0)
    sizes = [(SPEC.num_layers, num_tokens, SPEC.top_k) for num_tokens in (1, 5, 1, 2, 9, 1)]
    # 8 stands for a choice of none.
    return [routed_step(rng.integers(0, 9, size)) for size in sizes]


def test_routing__is_each_step_s_set_of_experts(steps):
    found = RecordedRouting(iter(steps), SPEC)
    expected = [
        [sorted({int(e) for e in np.unique(layer)} - {8}) for layer in step.experts_LTK]
        for step in steps
    ]
    assert list(found) == expected
    assert list(found) == expected  # once more


def test_count_tokens__counts_tokens_in_ascending_order(steps):
    for step in steps:
        if len(step.experts_LTK[0]) == 1:
            continue
        for layer in step.experts_LTK:
            ids, counts = np.unique(layer[layer < 8], return_counts=True)
            found = count_tokens(layer, 8)
            assert list(found.items()) == list(zip(ids.tolist(), counts.tolist(), strict=True))


def test_count_tokens__one_token_has_each_of_its_experts_once():
    assert count_tokens(np.array([[5, 8, 2]]), 8) == {2: 1, 5: 1}
