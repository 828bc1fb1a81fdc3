"""Host memory as a window of layers that moves ahead of the computation."""

import numpy as np
import pytest

from runtime.config import SystemConfig
from runtime.policy.build import build_device_cache
from tests.builders.entries import tiny_spec
from tests.unit.runtime.policy.test_device_cache import drain

SPEC = tiny_spec(num_layers=6, num_experts=2, top_k=1)
WINDOW = {"eviction": "first-layers", "host_window": True, "chunked": False, "drop_used": True}

TWO = np.zeros(2, dtype=np.int64)
"""Two tokens of a request, which may need both experts of a layer."""


def tiers_of(*num_slots, **system):
    config = SystemConfig(per_layer=False, **system)
    return build_device_cache(config, SPEC, num_slots=[num_slots], chunk_bytes=[(1,)] * 6)


def run_tasks(core):
    """Completes the tiers' transfers until there are none; returns the experts read from disk."""
    return [task.expert for task in drain(core, depth=1)]


def layers_below(core):
    return sorted({layer for layer, _ in core.tiers[1].cache.entries})


def route(core, layer, *experts):
    order = core.request_routed(layer, dict.fromkeys(experts, 1))
    read = run_tasks(core)
    for e in order:
        core.release((layer, e))
    return read


def test_window__reads_the_next_layers_and_gives_up_the_last():
    core = tiers_of(3, 6, **WINDOW)  # a layer and one hot expert above, three layers below
    core.fill()
    assert layers_below(core) == [0, 1, 2]
    core.begin_step(TWO)
    assert run_tasks(core) == []
    # Layer 0's expert 1 makes room for layer 3 at once, expert 0 when layer 1 is routed.
    assert route(core, 0, 0) == [(3, 0)]
    assert route(core, 1, 0, 1) == [(3, 1)]
    assert layers_below(core) == [1, 2, 3]
    for layer in (2, 3, 4):
        route(core, layer, 0, 1)
    # After the last layer comes the first, of the next step.
    assert layers_below(core) == [0, 4, 5]
    assert route(core, 5, 0) == [(1, 0), (1, 1), (2, 0)]
    core.end_step()
    assert (run_tasks(core), layers_below(core)) == ([(2, 1)], [0, 1, 2])


def test_window__leaves_out_what_the_device_holds_for_good():
    core = tiers_of(5, 4, **WINDOW)  # two experts of layer 0 stay above
    core.begin_step(TWO)
    assert run_tasks(core) == [(1, 0), (1, 1), (2, 0), (2, 1)]
    # Requested once, it passes through host memory and is dropped there first.
    assert route(core, 0, 0)[0] == (0, 0)
    assert (core.is_ready((0, 0)), (0, 0) in core.tiers[1].cache.entries) == (True, False)


@pytest.mark.parametrize("host_window", [False, True])
def test_host_memory__without_a_window_reads_nothing_ahead(host_window):
    core = tiers_of(3, 6, host_window=host_window)
    core.begin_step(TWO)
    assert bool(run_tasks(core)) is host_window
