"""The policy core against its invariants (stateful property tests) and against hand-made cases."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from runtime.config import SystemConfig
from runtime.policy.build import build_device_cache
from runtime.policy.counters import sum_counters
from runtime.policy.device_cache import DeviceCache
from tests.builders.entries import tiny_spec

LAYERS, EXPERTS, SLOTS, CHUNKS = 3, 6, 9, (10, 10, 20)
SPEC = tiny_spec(num_layers=LAYERS, num_experts=EXPERTS, top_k=3)
EVERYTHING = [(layer, e) for layer in range(LAYERS) for e in range(EXPERTS)]


def make_cache(*, slots=(SLOTS,), per_layer=True, **switches) -> DeviceCache:
    """Tiers with these numbers of slots, the computing one first.

    One that has room for three experts of each layer is divided by layers.
    """
    system = SystemConfig(per_layer=per_layer, **switches)
    return build_device_cache(system, SPEC, num_slots=[slots], chunk_bytes=[CHUNKS] * LAYERS)


def once(experts) -> dict[int, int]:
    """Each expert for one token."""
    return dict.fromkeys(experts, 1)


def drain(core: DeviceCache, depth: int = 0) -> list:
    """Carries out transfers until there are none; returns those of the computing tier, or below.

    Nothing is requested meanwhile, so each tier transfers an expert a few times at most.
    """
    tasks = []
    most = 4 * len(core.tiers) * LAYERS * EXPERTS * len(CHUNKS)
    for _ in range(most):
        for one in core.tiers:
            if (task := one.next_task()) is not None:
                one.complete(task)
                if one is core.tiers[depth]:
                    tasks.append(task)
                break
        else:
            return tasks
    raise AssertionError(f"{most} transfers and no end: {tasks[-5:]}")


def compute(core: DeviceCache, layer: int, order: list[int]) -> None:
    """Computes requested experts as they arrive."""
    while order:
        drain(core)
        ready = next(e for e in order if core.is_ready((layer, e)))
        assert core.entry((layer, ready)).pins == 1
        core.release((layer, ready))
        order.remove(ready)


class Machine(RuleBasedStateMachine):
    """Predictions, routings, transfers, failures, hangs and computations in any order."""

    slots: tuple[int, ...] = (SLOTS,)
    per_layer = True
    switches: dict = {}

    def __init__(self):
        super().__init__()
        self.core = make_cache(slots=self.slots, per_layer=self.per_layer, **self.switches)
        self.flying, self.lost = ([[] for _ in self.slots] for _ in range(2))
        self.pending: dict[int, list[int]] = {}
        self.early: dict[int, set[int]] = {}
        self.broken, self.moved = set[tuple[int, int]](), 0

    experts = st.sets(st.integers(0, EXPERTS - 1), min_size=1, max_size=EXPERTS).map(sorted)
    layers = st.integers(0, LAYERS - 1)
    depths = st.integers(0, 1)
    ends = st.sampled_from(["complete", "complete", "fail", "retry"])

    @rule(layer=layers, experts=experts)
    def predict(self, layer, experts):
        self.core.prefetch(layer, experts, [float(e) for e in experts])

    @rule(layer=layers, experts=experts)
    def route_a_part(self, layer, experts):
        if layer not in self.pending:
            early = self.early.setdefault(layer, set())
            before = sum_counters(self.core.counters).requests
            assert self.core.request_early(layer, experts) == sorted(set(experts) - early)
            assert sum_counters(self.core.counters).requests - before == len(set(experts) - early)
            early.update(experts)

    @rule(layer=layers, experts=experts, all_of_early=st.booleans())
    def route(self, layer, experts, all_of_early):
        if layer not in self.pending:
            early = self.early.pop(layer, set())
            if all_of_early:
                experts = sorted(early.union(experts))
            before = sum_counters(self.core.counters).requests
            order = self.core.request_routed(layer, once(experts))
            # Each is counted when it is first requested.
            assert sum_counters(self.core.counters).requests - before == len(set(experts) - early)
            assert sorted(order) == experts
            if any((layer, e) in self.broken for e in experts):
                self.core.cancel(layer, order)
            else:
                self.pending[layer] = order
            self.broken = {expert for expert in self.broken if expert[0] != layer}

    @rule(layer=layers)
    def displace(self, layer):
        self.core.displace_early(layer)

    @rule()
    def end_step(self):
        """Layers that a part of the step only has reached are given up."""
        self.core.end_step()
        self.early.clear()
        self.broken.clear()

    def at(self, depth):
        depth = min(depth, len(self.slots) - 1)
        return depth, self.core.tiers[depth]

    @rule(depth=depths, high_only=st.booleans())
    def start(self, depth, high_only):
        depth, one = self.at(depth)
        if (task := one.next_task(high_only=high_only)) is not None:
            assert all(task.slot != other.slot for other in self.flying[depth] + self.lost[depth])
            assert task.high or not high_only
            self.flying[depth].append(task)

    @rule(data=st.data(), depth=depths, end=ends)
    def finish(self, data, depth, end):
        depth, one = self.at(depth)
        if not self.flying[depth]:
            return
        task = self.flying[depth].pop(data.draw(st.integers(0, len(self.flying[depth]) - 1)))
        getattr(one, end)(task)
        if end == "complete":
            self.moved += task.num_bytes if depth == 0 else 0
        layer, expert = task.expert
        if end == "fail" and expert in self.pending.get(layer, []):
            self.core.cancel(layer, self.pending.pop(layer))
        if end == "fail" and expert in self.early.get(layer, ()):
            self.broken.add(task.expert)

    @rule(data=st.data(), depth=depths)
    def hang(self, data, depth):
        depth, one = self.at(depth)
        if self.flying[depth] and len(self.lost[depth]) < 2:
            i = data.draw(st.integers(0, len(self.flying[depth]) - 1))
            if one.quarantine(self.flying[depth][i]):
                self.lost[depth].append(self.flying[depth].pop(i))

    @rule(depth=depths)
    def come_back(self, depth):
        depth, one = self.at(depth)
        if self.lost[depth]:
            one.restore(self.lost[depth].pop())

    @rule(layer=layers)
    def compute(self, layer):
        for e in self.pending.get(layer, []):
            if self.core.is_ready((layer, e)):
                self.core.release((layer, e))
                self.pending[layer].remove(e)
                break
        if layer in self.pending and not self.pending[layer]:
            del self.pending[layer]

    @rule(layer=layers)
    def give_up(self, layer):
        if layer in self.pending:
            self.core.cancel(layer, self.pending.pop(layer))

    @invariant()
    def slots_belong_to_one_expert_and_shares_hold(self):
        """Each tier counts what is ready, and in flight is what was started."""
        tiers = zip(self.core.tiers, self.slots, self.flying, self.lost, strict=True)
        for one, size, flying, lost in tiers:
            entries = one.cache.entries
            slots = [entry.slot for entry in entries.values()] + [task.slot for task in lost]
            assert len(set(slots)) == len(slots) <= size
            assert all(0 <= slot < size for slot in slots)
            in_flight = {expert for expert, entry in entries.items() if entry.in_flight}
            assert in_flight == {task.expert for task in flying}
            assert one.num_ready == sum(map(one.is_ready, EVERYTHING))
        assert self.core.is_complete == all(map(self.core.is_ready, EVERYTHING))
        if self.core.top.cache.per_layer:
            for layer in range(LAYERS):
                held = sum(expert[0] == layer for expert in self.core.top.cache.entries)
                assert held <= self.slots[0] // LAYERS

    @invariant()
    def pins_are_held_by_pending_experts_and_copies_only(self):
        for (layer, e), entry in self.core.top.cache.entries.items():
            assert entry.pins == self._holders(layer, e), (layer, e, entry)
        if len(self.slots) > 1:
            copying = [task.expert for task in self.flying[0] + self.lost[0]]
            for expert, entry in self.core.tiers[1].cache.entries.items():
                wanted = self._holders(*expert) > 0
                assert entry.pins <= wanted + copying.count(expert), (expert, entry)
                assert entry.pins >= copying.count(expert), (expert, entry)

    def _holders(self, layer, e):
        """Routers that requested the expert and, until the whole layer is routed, correct forecasts
        that pinned it."""
        early = () if layer in self.core._displaced else self.early.get(layer, ())
        held = e in self.core._pinned_early.get(layer, ())
        assert layer in self.early or not held
        return (e in self.pending.get(layer, ()) or e in early) + held

    @invariant()
    def bytes_add_up(self):
        total = sum_counters(self.core.counters)
        left = sum(entry.speculative_bytes for entry in self.core.top.cache.entries.values())
        assert total.bytes_moved == self.moved
        assert total.bytes_prefetched == total.bytes_used + total.bytes_wasted + left

    def teardown(self):
        """Every requested expert can still be computed to the end, layer by layer."""
        for one, flying, lost in zip(self.core.tiers, self.flying, self.lost, strict=True):
            while flying:
                one.complete(flying.pop(0))
            while lost:
                one.restore(lost.pop(0))
        for layer, order in self.pending.items():
            while order:
                drain(self.core)
                ready = next((e for e in order if self.core.is_ready((layer, e))), None)
                if ready is None:
                    assert self.core.displace_early(layer) or self._give_up_another(layer)
                    continue
                self.core.release((layer, ready))
                order.remove(ready)
        self.core.end_step()
        self.early.clear()
        self.pins_are_held_by_pending_experts_and_copies_only()

    def _give_up_another(self, layer) -> bool:
        """An engine has one layer pending; here others may hold all the slots."""
        others = [one for one, order in self.pending.items() if one != layer and order]
        for one in others:
            self.core.cancel(one, self.pending[one])
            self.pending[one].clear()
        return bool(others) and not self.per_layer


LEAST = {"least_prefetch": CHUNKS[0] + 1}


class EverythingFits(Machine):
    """Slots for every expert, of which few are missing: the cache is often complete."""

    slots = (LAYERS * EXPERTS,)
    switches = LEAST

    def __init__(self):
        super().__init__()
        self.core.top.fill(EVERYTHING)
        for layer in range(LAYERS):
            self.core.top.evict((layer, layer))

    @rule()
    def be_cut_short(self):
        """Ctrl-C in a call: what has arrived stays, what hangs keeps its slot, no more."""
        self.flying[0].clear()
        self.pending.clear()
        self.early.clear()
        self.core.reset([[task.slot for task in self.lost[0]]])


ONE_SHARE = {"per_layer": False}
"""All layers share the slots: some tokens' requests can leave an earlier layer none."""
MACHINES = {
    "a share for each layer": (Machine, {}, 30),
    "one share": (Machine, {**ONE_SHARE, "slots": (4,)}, 60),
    "everything fits": (EverythingFits, {}, 30),
    "two tiers": (Machine, {"slots": (SLOTS, 7)}, 60),
    "one share of two tiers": (Machine, {**ONE_SHARE, "slots": (4, 3), "switches": LEAST}, 60),
    "a small lower tier": (Machine, {"slots": (9, 3), "switches": {"cancel": True}}, 30),
}


@pytest.mark.parametrize(("base", "fields", "examples"), MACHINES.values(), ids=MACHINES)
def test_device_cache__invariants_hold_in_any_order(base, fields, examples):
    how = settings(max_examples=examples, stateful_step_count=50, deadline=None)
    run_state_machine_as_test(type("Machine", (base,), fields), settings=how)


def test_device_cache__prefetches_do_not_take_each_others_slots():
    core = make_cache(slots=(9, 7))
    upper, lower = core.tiers
    lower.prefetch((0, 5), 0.9)
    drain(core)
    # The forecasts name more experts than the layer has slots; the lower tier holds only the last.
    core.prefetch(0, [0, 1, 2], [0.9, 0.8, 0.7])
    core.prefetch(0, [5], [0.1])
    assert upper.next_task().expert == (0, 5)
    assert list(upper.cache) == [(0, 5)]  # the others take no slot before they can be copied


def test_device_cache__each_expert_of_many_forecasts_is_copied_once():
    core = make_cache(slots=(9, 7))
    core.prefetch(0, [5], [0.1])
    lower = core.tiers[1]
    core.top.next_task()
    lower.complete(lower.next_task())
    core.prefetch(0, [0, 1, 2], [0.9, 0.8, 0.7])
    copied = [task.expert for task in drain(core)]
    assert sorted(copied) == sorted((0, e) for e in (0, 1, 2, 5) for _ in CHUNKS)


def test_counters__fetch_rate_is_of_predicted_accesses_that_were_not_resident():
    core = make_cache(slots=(4,), per_layer=False)
    compute(core, 1, core.request_routed(1, once([0])))
    for _ in range(2):  # the second names what the first has fetched
        core.prefetch(1, [0, 1], [0.0, 1.0])
        drain(core)
    core.prefetch(1, [0, 1, 2, 3], [0.0, 0.0, 1.0, 0.5])
    core.top.complete(core.top.next_task())  # a chunk of 2, of three
    # 0 is resident, 1 prefetched, 2 late, 3 never asked for, and 4 was not predicted.
    core.request_routed(1, once([0, 1, 2, 4]))
    counters = core.counters[1]
    assert (counters.requests, counters.hits, counters.predicted) == (5, 2, 4)
    assert (counters.needed_predicted, counters.needed_predicted_in_time) == (3, 2)
    assert (counters.needed_predicted_resident, counters.resident_rate) == (1, 1 / 3)
    # The first of 1 and 2.
    assert (counters.fetch_rate, counters.promoe_fetch_rate) == (1 / 2, 2 / 3)
    assert (counters.recall, counters.promoe_good_pred) == (3 / 5, 2 / 5)


def test_counters__what_an_earlier_prediction_fetched_is_not_resident():
    core = make_cache()
    core.prefetch(1, [2], [0.0])
    drain(core)
    core.request_routed(1, once([3]))
    core.prefetch(1, [2], [0.0])  # not requested since it was fetched
    core.request_routed(1, once([2]))
    counters = core.counters[1]
    assert (counters.needed_predicted_in_time, counters.needed_predicted_resident) == (1, 0)


def test_device_cache__joins_a_prefetch_in_flight():
    core = make_cache()
    core.prefetch(1, [0], [0.0])
    task = core.top.next_task()
    core.request_routed(1, once([0]))
    assert core.top.next_task() is None
    core.top.complete(task)
    drain(core)
    counters = core.counters[1]
    assert (counters.joins, counters.misses, counters.hits) == (1, 0, 0)
    assert counters.bytes_prefetched == counters.bytes_used == CHUNKS[0]
    assert counters.bytes_moved == counters.bytes_late == sum(CHUNKS)


def test_device_cache__computes_cached_then_in_flight_then_missing():
    core = make_cache()
    core.prefetch(0, [4, 2], [1.0, 0.0])
    for _ in range(4):
        core.top.complete(core.top.next_task())
    assert core.request_routed(0, once([1, 2, 4])) == [4, 2, 1]
    assert make_cache(reordered=False).request_routed(0, once([4, 1, 2])) == [1, 2, 4]


def test_device_cache__without_preemption_routing_cancels_nothing():
    late = {"early_preemption": False}
    cases = ((late, [(1, 0), (1, 1)]), ({**late, "cancel": True}, [(1, 1)]), ({}, []))
    for switches, left in cases:
        core = make_cache(**switches)
        core.begin_step(np.array([0]))
        core.prefetch(1, [0, 1], [0.9, 0.1])
        core.request_routed(1, once([1, 4]))
        assert core.top.queue.low() == left, switches


def test_device_cache__without_chunks_an_expert_is_one_task():
    core = make_cache(chunked=False)
    core.request_routed(0, once([3]))
    (task,) = drain(core)
    assert (task.first_chunk, task.end_chunk, task.num_bytes) == (0, 3, 40)


def test_device_cache__whole_requests_leave_prefetches_in_chunks():
    core = make_cache(whole_requests=True)
    core.prefetch(1, [2], [0.9])
    first = core.top.next_task()
    core.top.complete(first)
    core.request_routed(1, once([2, 3]))
    chunks = [(task.expert[1], task.first_chunk, task.end_chunk) for task in drain(core)]
    assert [(2, first.first_chunk, first.end_chunk), *chunks] == [(2, 0, 1), (2, 1, 3), (3, 0, 3)]


def test_device_cache__prefetches_move_the_least_bytes_at_once():
    for least, ends in ((0, [1, 2, 3]), (10, [1, 2, 3]), (11, [2, 3]), (21, [3]), (99, [3])):
        core = make_cache(least_prefetch=least)
        core.prefetch(1, [2], [0.9])
        assert [task.end_chunk for task in drain(core)] == ends, least
        core.request_routed(0, once([3]))
        assert [task.end_chunk for task in drain(core)] == [1, 2, 3], least


def test_device_cache__a_request_interrupts_a_prefetch_after_the_least_bytes():
    core = make_cache(least_prefetch=11, whole_requests=True)
    core.prefetch(1, [2], [0.9])
    first = core.top.next_task()
    assert (first.first_chunk, first.end_chunk, first.num_bytes) == (0, 2, 20)
    core.request_routed(0, once([3]))
    core.top.complete(first)
    chunks = [(task.expert, task.first_chunk, task.end_chunk) for task in drain(core)]
    assert chunks == [((0, 3), 0, 3), ((1, 2), 2, 3)]


def test_device_cache__whole_requests_copy_what_the_lower_tier_holds():
    core = make_cache(slots=(3, 9), per_layer=False, whole_requests=True)
    core.request_routed(0, once([1]))
    upper, lower = core.tiers
    assert upper.next_task() is None
    for _ in range(2):
        task = lower.next_task()
        assert task.end_chunk - task.first_chunk == 1
        lower.complete(task)
    assert [(task.first_chunk, task.end_chunk) for task in drain(core)] == [(0, 2), (2, 3)]


def test_device_cache__without_preemption_requests_one_by_one():
    core = make_cache(early_preemption=False)
    order = core.request_routed(0, once([1, 2]))
    assert drain(core) == []
    core.request((0, order[0]))
    assert {task.expert for task in drain(core)} == {(0, 1)}


def test_drop_used__evicts_wrong_forecasts_after_routing():
    core = make_cache(drop_used=True)
    core.begin_step(np.array([0]))
    core.prefetch(1, [2, 3], [1.0, 0.0])
    drain(core)
    assert set(core.top.cache) == {(1, 2), (1, 3)}
    core.request_routed(1, once([3]))
    assert set(core.top.cache) == {(1, 3)}
    core.release((1, 3))
    assert set(core.top.cache) == set()


def test_hot_first__computes_experts_with_most_tokens_first():
    counts, core = {0: 1, 1: 5, 2: 3}, make_cache(hot_first=True)
    assert core.request_routed(0, counts) == [1, 2, 0]
    # What has arrived still comes before what has not.
    for _ in CHUNKS:
        core.top.complete(core.top.next_task())
    for e in counts:
        core.release((0, e)) if core.is_ready((0, e)) else core.cancel(0, [e])
    assert core.request_routed(0, {0: 9, 1: 1}) == [1, 0]


def test_is_complete__only_where_used_experts_stay():
    for drop_used in (False, True):
        core = make_cache(slots=(LAYERS * EXPERTS,), drop_used=drop_used)
        core.top.fill(EVERYTHING)
        assert core.is_complete == (not drop_used)


def test_count_routed__counts_what_requests_do():
    counted, requested = make_cache(), make_cache()
    for core in (counted, requested):
        core.prefetch(0, [0, 1, 2], [0.9, 0.8, 0.7])
        drain(core)
    counted.count_routed(0, [1, 4])
    requested.request_routed(0, once([1, 4]))
    assert counted.counters == requested.counters
    assert counted.counters[0].hits == counted.counters[0].misses == 1
    assert counted.top.next_task() is None


def test_request_early__pins_predicted_experts_until_routing():
    core = make_cache(slots=(3,), per_layer=False, chunked=False, drop_used=True)
    core.begin_step(np.array([0]))
    core.prefetch(1, [0, 1], [0.1, 0.0])
    drain(core)
    core.request_early(1, [2, 3, 4])
    drain(core)
    # One slot is free for requested experts; LRU alone would have evicted the forecast ones.
    assert all(core.is_ready((1, e)) for e in (0, 1))
    order = core.request_routed(1, once([0, 2, 3, 4]))
    assert sorted(order) == [0, 2, 3, 4]
    moved = sum_counters(core.counters).bytes_moved
    assert core.top.cache.entries.get((1, 1)) is None  # forecast in vain: it leaves at once
    compute(core, 1, order)
    core.end_step()
    # Expert 0 was not read again.
    assert sum_counters(core.counters).bytes_moved - moved == 2 * sum(CHUNKS)
    assert not any(entry.pins for entry in core.top.cache.entries.values())
