"""Idle link time fetches experts with the highest eviction scores and delays no request."""

import numpy as np
import pytest

from runtime.config import SystemConfig
from runtime.policy.build import adapt_to_link
from runtime.policy.counters import sum_counters
from tests.unit.runtime.policy.test_device_cache import CHUNKS, EXPERTS, LAYERS, drain, make_cache

ONE = np.array([0])


def core(num_slots: int, **options):
    return make_cache(slots=(num_slots,), eviction="reuse", per_layer=False, **options)


def step(one, values: dict[int, list[float]]) -> None:
    """A forward pass that chose expert 0 of every layer, given the scores of layers' experts."""
    one.begin_step(ONE)
    for layer in range(LAYERS):
        one.on_reuse_scores(layer, [values.get(layer, [0.0] * EXPERTS)])
        one.request_routed(layer, {0: 1})
        while not one.is_ready((layer, 0)):
            task = one.top.next_task()
            assert task.high or one.top.idle_prefetch
            one.top.complete(task)
        one.release((layer, 0))
    one.end_step()


def test_idle_prefetch__replaces_lower_by_higher_scores_if_it_is_on() -> None:
    one, by_default = core(4, idle_prefetch=True), core(4)
    for either in (one, by_default):
        step(either, {0: [0.5, 0.9, 0.1, 0.8, 0, 0], 2: [0.02, 0.3, 0, 0, 0, 0]})
    assert drain(by_default) == [] != drain(one)
    # (0, 1) and (0, 3) first, (2, 1) next, without requests. (1, 0), with score 0, was evicted.
    assert sorted(one.top.cache) == [(0, 0), (0, 1), (0, 3), (2, 1)]
    assert sum_counters(one.top.counters).bytes_prefetched == 3 * sum(CHUNKS)


def test_idle_prefetch__skips_rarely_used_and_lower_scored_experts() -> None:
    one = core(2, idle_prefetch=True)
    step(one, {layer: [0.9, 0.02, 0.02, 0.02, 0.02, 0.02] for layer in range(LAYERS)})
    before = sorted(one.top.cache)
    assert (drain(one), sorted(one.top.cache)) == ([], before)


def test_idle_prefetch__comes_after_forecasts_and_ends_with_routing() -> None:
    one = core(6, idle_prefetch=True)
    step(one, {1: [0, 0.9, 0, 0.8, 0, 0]})
    first = one.top.next_task()
    one.prefetch(2, [4], [0.5])
    one.top.complete(first)
    second = one.top.next_task()
    assert (first.expert, second.expert) == ((1, 1), (2, 4))
    one.top.complete(second)
    one.begin_step(ONE)
    one.on_reuse_scores(1, [[0.0] * EXPERTS])
    one.request_routed(1, {5: 1})
    assert not one.top.queue.is_low((1, 1))
    one.cancel(1, [5])


@pytest.mark.parametrize(("slows_computing", "fills"), [(True, False), (False, True)])
def test_adapt_to_link__slow_computing_ends_idle_prefetch(slows_computing, fills):
    system = SystemConfig(eviction="reuse", idle_prefetch=True, per_layer=False)
    assert adapt_to_link(system, slows_computing=slows_computing).idle_prefetch is fills
    assert not adapt_to_link(SystemConfig(), slows_computing=slows_computing).idle_prefetch
