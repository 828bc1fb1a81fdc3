"""An expert that is computed is pinned, whatever was cancelled before."""

import numpy as np

from tests.builders.served import serving, settle


def test_pin__an_expert_that_arrived_after_its_request_was_cancelled(folder):
    """A loop in a fixed order gives up requests to make room, and a transfer under way goes on."""
    with serving(folder, budget="50%") as model:
        engine, token = model.moecast.engine, np.zeros(1, np.int64)
        engine.begin_step(token, token)
        engine.routed(0, np.array([[0, 1]]), None, None)
        engine.pin(0, 0)
        settle(engine)
        assert engine.cache.is_ready((0, 1))
        engine.cache.cancel(0, [1])
        assert engine.cache.entry((0, 1)).pins == 0
        engine.pin(0, 1)
        assert engine.cache.entry((0, 1)).pins == 1
        engine.end_step()
        assert not any(entry.pins for entry in engine.cache.top.cache.entries.values())
