"""The policy core against its invariants (stateful property test) and against hand-made cases."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from predictors.errors import MoecastError
from runtime.policy.cache import ExpertCache
from runtime.policy.eviction import Lfu, Lru, eviction
from runtime.policy.prefetcher import Prefetcher, Techniques

LAYERS, EXPERTS, SLOTS, CHUNKS = 3, 6, 9, (10, 10, 20)


def prefetcher(*, slots=SLOTS, per_layer=True, policy=Lru, **switches) -> Prefetcher:
    cache = ExpertCache(num_slots=slots, num_layers=LAYERS, per_layer=per_layer, eviction=policy)
    return Prefetcher(cache, chunk_bytes=[CHUNKS] * LAYERS, techniques=Techniques(**switches))


def drain(core: Prefetcher) -> list:
    tasks = []
    while (task := core.next_task()) is not None:
        core.done(task)
        tasks.append(task)
    return tasks


class Machine(RuleBasedStateMachine):
    """Predictions, routings, transfers, failures and computations in any order."""

    def __init__(self):
        super().__init__()
        self.core = prefetcher()
        self.flying = []
        self.pending: dict[int, list[int]] = {}
        self.moved = 0

    experts = st.sets(st.integers(0, EXPERTS - 1), min_size=1, max_size=EXPERTS).map(sorted)
    layers = st.integers(0, LAYERS - 1)

    @rule(layer=layers, experts=experts)
    def predict(self, layer, experts):
        self.core.predicted(layer, experts, [float(e) for e in experts])

    @rule(layer=layers, experts=experts)
    def route(self, layer, experts):
        if layer not in self.pending:
            order = self.core.routed(layer, experts)
            assert sorted(order) == experts
            self.pending[layer] = order

    @rule()
    def start(self):
        if (task := self.core.next_task()) is not None:
            assert all(task.slot != other.slot for other in self.flying)
            self.flying.append(task)

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), fails=st.booleans())
    def finish(self, data, fails):
        task = self.flying.pop(data.draw(st.integers(0, len(self.flying) - 1)))
        if not fails:
            self.core.done(task)
            self.moved += task.num_bytes
            return
        layer, expert = task.expert
        self.core.failed(task)
        if expert in self.pending.get(layer, []):
            self.core.abandon(layer, self.pending.pop(layer))

    @rule(layer=layers)
    def compute(self, layer):
        for e in self.pending.get(layer, []):
            if self.core.is_ready((layer, e)):
                self.core.used((layer, e))
                self.pending[layer].remove(e)
                break
        if layer in self.pending and not self.pending[layer]:
            del self.pending[layer]

    @rule(layer=layers)
    def give_up(self, layer):
        if layer in self.pending:
            self.core.abandon(layer, self.pending.pop(layer))

    @invariant()
    def slots_belong_to_one_expert_and_shares_hold(self):
        entries = self.core.cache.entries
        slots = [entry.slot for entry in entries.values()]
        assert len(set(slots)) == len(slots) <= SLOTS
        assert all(0 <= slot < SLOTS for slot in slots)
        for layer in range(LAYERS):
            assert sum(expert[0] == layer for expert in entries) <= SLOTS // LAYERS

    @invariant()
    def in_flight_is_what_was_started(self):
        flying = {expert for expert, entry in self.core.cache.entries.items() if entry.in_flight}
        assert flying == {task.expert for task in self.flying}

    @invariant()
    def pins_are_held_by_pending_experts_only(self):
        for (layer, e), entry in self.core.cache.entries.items():
            assert entry.pins == (e in self.pending.get(layer, [])), (layer, e, entry)

    @invariant()
    def bytes_add_up(self):
        total = self.core.total()
        left = sum(entry.speculative_bytes for entry in self.core.cache.entries.values())
        assert total.bytes_moved == self.moved
        assert total.bytes_prefetched == total.bytes_used + total.bytes_wasted + left

    def teardown(self):
        """Whatever happened, everything asked for can still be computed to the end."""
        for task in self.flying:
            self.core.done(task)
        for layer, order in self.pending.items():
            while order:
                drain(self.core)
                ready = next(e for e in order if self.core.is_ready((layer, e)))
                self.core.used((layer, ready))
                order.remove(ready)


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)


def test_prefetcher__more_experts_than_slots_stream_through():
    core = prefetcher(slots=3)
    order = core.routed(0, range(EXPERTS))
    computed = []
    while order:
        drain(core)
        expert = next(e for e in order if core.is_ready((0, e)))
        core.used((0, expert))
        order.remove(expert)
        computed.append(expert)
    assert sorted(computed) == list(range(EXPERTS))
    assert core.total().bytes_moved == EXPERTS * sum(CHUNKS)


def test_prefetcher__precise_requests_go_before_predictions_within_a_chunk():
    core = prefetcher()
    core.predicted(1, [0], [1.0])
    first = core.next_task()
    assert (first.expert, first.first_chunk, first.end_chunk) == ((1, 0), 0, 1)
    core.routed(0, [5])
    core.done(first)
    assert [task.expert for task in drain(core)] == [(0, 5)] * 3 + [(1, 0)] * 2


def test_prefetcher__routing_drops_what_was_only_predicted_for_the_layer():
    core = prefetcher()
    core.predicted(1, [0, 1], [0.0, 1.0])
    core.done(core.next_task())
    core.routed(1, [4])
    assert [task.expert for task in drain(core)] == [(1, 4)] * 3
    counters = core.counters[1]
    assert (counters.predicted, counters.predicted_in_time, counters.misses) == (2, 0, 1)


def test_prefetcher__a_predicted_expert_in_flight_is_joined_not_fetched_again():
    core = prefetcher()
    core.predicted(1, [0], [0.0])
    task = core.next_task()
    core.routed(1, [0])
    assert core.next_task() is None
    core.done(task)
    drain(core)
    counters = core.counters[1]
    assert counters.bytes_moved == sum(CHUNKS)
    assert (counters.joins, counters.misses, counters.hits) == (1, 0, 0)
    assert counters.bytes_prefetched == counters.bytes_used == CHUNKS[0]
    assert counters.bytes_late == sum(CHUNKS)


def test_prefetcher__order_is_cached_then_in_flight_then_missing():
    core = prefetcher()
    core.predicted(0, [4, 2], [0.0, 1.0])
    for _ in range(4):
        core.done(core.next_task())
    assert core.routed(0, [1, 2, 4]) == [4, 2, 1]
    assert prefetcher(reordered=False).routed(0, [4, 1, 2]) == [1, 2, 4]


def test_prefetcher__without_chunks_an_expert_is_one_task():
    core = prefetcher(chunked=False)
    core.routed(0, [3])
    assert [(task.first_chunk, task.end_chunk, task.num_bytes) for task in drain(core)] == [
        (0, 3, 40)
    ]


def test_prefetcher__without_early_preemption_each_expert_is_asked_for_in_its_turn():
    core = prefetcher(early_preemption=False)
    order = core.routed(0, [1, 2])
    assert drain(core) == []
    core.demand((0, order[0]))
    assert {task.expert for task in drain(core)} == {(0, 1)}


def test_lru__drops_the_least_recent_and_spares_what_may_not_go():
    policy = Lru()
    for expert in [(0, 1), (0, 2), (0, 3), (0, 1)]:
        policy.touched(expert)
    assert policy.victim(lambda _: True) == (0, 2)
    assert policy.victim(lambda expert: expert == (0, 1)) == (0, 1)
    assert policy.victim(lambda _: False) is None


def test_lfu__drops_the_least_used():
    policy = Lfu()
    for expert in [(0, 1), (0, 1), (0, 2), (0, 3), (0, 3)]:
        policy.touched(expert)
    assert policy.victim(lambda _: True) == (0, 2)


def test_eviction__unknown_name_lists_choices():
    with pytest.raises(MoecastError, match=r"'lruu'.*Did you mean 'lru'.*fifo, lfu, lru"):
        eviction("lruu")
