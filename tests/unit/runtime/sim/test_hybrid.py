"""Replays in which the host's processor computes missed experts where they lie."""

from dataclasses import replace
from typing import Any

import pytest

from predictors.errors import MoecastError
from tests.builders.entries import tiny_spec
from tests.builders.simulated import one_token, routed_step, toy_accelerator, toy_machine
from tests.unit.runtime.sim import test_simulator

MACHINE = toy_accelerator(
    link_bytes_per_second=1.0, memory_bytes_per_second=6.0, chunk_bytes=(2, 2, 2), layer_bytes=60,
    host_memory_bytes_per_second=4.0, host_flops=1e9,
)  # fmt: skip
"""A layer takes 10 s, an expert 1 s, its copy 6 s, and 2 s in host memory: 6 bytes at 4 a second,
less the 1 of the copies."""


def run(steps, *, hybrid=True, machine=MACHINE, slots=8):
    switches = {"prefetch": False, "hybrid": hybrid}
    return test_simulator.run(None, steps, slots, machine=machine, **switches)


def test_hybrid__a_miss_takes_the_time_of_the_processor():
    assert run([one_token(0, 1)], hybrid=False).tpot_seconds == [34.0]
    stats = run([one_token(0, 1)])
    assert (stats.tpot_seconds, stats.total.bytes_moved) == ([24.0], 0)
    assert stats.total.computed_below == stats.total.misses == 2


def test_hybrid__copies_where_the_processor_is_slower():
    stats = run([one_token(0, 1)] * 2, machine=replace(MACHINE, host_flops=0.1))
    assert stats.tpot_seconds == [34.0, 22.0]
    assert (stats.total.computed_below, stats.total.hits) == (0, 2)


def test_hybrid__an_expert_must_lie_in_host_memory():
    """Each layer's expert comes from disk once, and is then computed where it lies."""
    machine = replace(MACHINE, store_bytes_per_second=1.0)
    stats = run([one_token(0, 1), one_token(2, 3), one_token(0, 1)], machine=machine, slots=(2, 8))
    assert (stats.total.misses, stats.total.computed_below, stats.tpot_seconds[2]) == (6, 2, 24.0)


def test_hybrid__leaves_a_copy_a_slot_of_host_memory():
    """Host memory holds experts 0 and 1, both missed together with one that the disk has."""
    machine = replace(MACHINE, store_bytes_per_second=1.0, host_share=0.5)
    steps = [routed_step([[0, 1, 2]])]
    spec = tiny_spec(num_layers=1, num_experts=4, top_k=1, hidden_size=1)
    hybrid: dict[str, Any] = {"prefetch": False, "hybrid": True, "spec": spec}
    stats = test_simulator.run(None, steps, 1, machine=machine, **hybrid)
    assert (stats.total.misses, stats.total.computed_below) == (3, 1)


def test_hybrid__needs_hardware_that_describes_host_memory():
    for machine in (toy_machine(), replace(MACHINE, host_memory_bytes_per_second=1.0)):
        with pytest.raises(MoecastError, match="hardware=toy describes no host memory"):
            run([one_token(0, 1)], machine=machine)
