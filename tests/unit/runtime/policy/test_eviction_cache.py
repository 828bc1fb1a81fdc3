"""The cache with every policy, through any order of events: slots, shares, pins, quarantine."""

import random

import numpy as np
import pytest
from hypothesis import settings, stateful
from hypothesis import strategies as st

from runtime.policy.cache import ExpertCache
from runtime.policy.eviction.registry import EVICTIONS
from tests.builders.arena import policy_of, random_routing

LAYERS, EXPERTS, SLOTS, STEPS = 3, 6, 8, 60
ALIKE = {"first_slots": (0, 0, 0), "divided": [range(3), range(3, 6), range(6, 8)]}
MIXED = {"first_slots": (3, 0, 5), "divided": [range(3, 5), range(3), range(5, 8)]}
"""Each layer's first slot that is large enough, and its slots where layers share none."""


class Machine(stateful.RuleBasedStateMachine):
    """Follows a routing step by step, so that Belady can know it, with anything in between."""

    name = "lru"

    @stateful.initialize(
        seed=st.integers(0, 2**16), per_layer=st.booleans(), sizes=st.sampled_from([ALIKE, MIXED])
    )
    def build(self, seed, per_layer, sizes):
        self.per_layer, (self.first_slots, self.divided) = per_layer, sizes.values()
        self.routing = random_routing(seed, steps=STEPS, layers=LAYERS, experts=EXPERTS, top_k=2)
        more = {"belady": {"future": self.routing}, "static": {"warmup_steps": 3}}
        self.cache = ExpertCache(
            num_slots=SLOTS, num_layers=LAYERS, per_layer=per_layer, first_slots=self.first_slots,
            policy=policy_of(self.name, LAYERS, EXPERTS, **more.get(self.name, {})),
        )  # fmt: skip
        self.random = random.Random(seed)
        self.step = self.layer = -1
        self.lost: set[int] = set()
        """Slots in quarantine."""

    def slots_for(self, layer: int) -> range:
        return self.divided[layer] if self.per_layer else range(self.first_slots[layer], SLOTS)

    def try_to_admit(self, expert):
        before, slots = dict(self.cache.entries), self.slots_for(expert[0])
        free = {*slots} - {entry.slot for entry in before.values()} - self.lost
        idle = {other for other, entry in before.items() if not (entry.pins or entry.in_flight)}
        may_go = {other for other in idle if before[other].slot in slots}
        entry, dropped = self.cache.admit(expert)
        assert (entry is not None) == bool(free or may_go)
        assert (dropped is not None) == (not free and bool(may_go))
        if dropped:
            assert dropped[0] in may_go
            assert dropped[1] is before[dropped[0]]
        left = set(before) - ({dropped[0]} if dropped else set())
        assert set(self.cache) == left | ({expert} if entry else set())
        return entry

    def any_of(self, condition):
        """Some expert in the arena whose entry fits, or None."""
        experts = sorted(e for e, entry in self.cache.entries.items() if condition(entry))
        return self.random.choice(experts) if experts else None

    @stateful.rule()
    def route(self):
        if self.layer in (-1, LAYERS - 1):
            if self.step == STEPS - 1:
                return
            if self.step >= 0:
                self.cache.policy.end_step()
            self.step, self.layer = self.step + 1, -1
            self.cache.policy.begin_step(np.array([self.step // 5]))
        self.layer += 1
        chosen = self.routing[self.step][self.layer]
        self.cache.policy.on_tokens_routed(self.layer, np.array([chosen]))
        self.cache.policy.on_routed(self.layer, dict.fromkeys(chosen, 1))
        for e in chosen:
            expert = self.layer, e
            entry = self.cache.entries.get(expert)
            if entry is None:
                entry = self.try_to_admit(expert)
            else:
                self.cache.policy.on_use(expert)
            if entry is not None:
                entry.pins += 1
        for (layer, _), entry in self.cache.entries.items():
            if layer != self.layer:
                entry.pins = 0

    @stateful.rule(layer=st.integers(0, LAYERS - 1), e=st.integers(0, EXPERTS - 1))
    def predict(self, layer, e):
        chance_E = [self.random.random() for _ in range(EXPERTS)]
        self.cache.policy.on_forecast(layer, chance_E, chance_E)
        if self.cache.entries.get((layer, e)) is not None:
            self.cache.policy.on_predict((layer, e))
        elif (entry := self.try_to_admit((layer, e))) is not None:
            entry.in_flight = self.random.random() < 0.5

    @stateful.rule()
    def start_a_transfer(self):
        if (expert := self.any_of(lambda entry: not entry.in_flight)) is not None:
            self.cache.entries.get(expert).in_flight = True

    @stateful.rule()
    def end_the_transfers(self):
        for entry in self.cache.entries.values():
            entry.in_flight = False

    @stateful.rule()
    def compute(self):
        for (layer, _), entry in self.cache.entries.items():
            if layer == self.layer and entry.pins:
                entry.pins -= 1

    @stateful.rule()
    def drop(self):
        if (expert := self.any_of(lambda one: not (one.pins or one.in_flight))) is not None:
            self.cache.remove(expert)

    @stateful.precondition(lambda self: len(self.lost) < 2)
    @stateful.rule()
    def hang(self):
        if (expert := self.any_of(lambda entry: entry.in_flight)) is not None:
            slot = self.cache.entries.get(expert).slot
            assert self.cache.quarantine(expert) == slot
            self.lost.add(slot)

    @stateful.precondition(lambda self: self.lost)
    @stateful.rule()
    def recover(self):
        slot = self.random.choice(sorted(self.lost))
        self.cache.restore(slot)
        self.lost.remove(slot)

    @stateful.invariant()
    def slots_are_free_or_used_or_lost(self):
        used = [entry.slot for entry in self.cache.entries.values()]
        assert len(self.lost.union(used)) == len(used) + len(self.lost) <= SLOTS
        for (layer, _), entry in self.cache.entries.items():
            assert entry.slot in self.slots_for(layer)
        for layer in range(LAYERS):
            slots = self.slots_for(layer)
            assert self.cache.share(layer) == len(slots) - len(self.lost.intersection(slots))


@pytest.mark.parametrize("name", sorted(EVICTIONS))
def test_cache__invariants_hold_with_every_policy(name):
    how = settings(max_examples=25, stateful_step_count=50, deadline=None, database=None)
    stateful.run_state_machine_as_test(type("Machine", (Machine,), {"name": name}), settings=how)


def test_cache__an_expert_takes_the_smallest_slot_that_is_large_enough():
    slots = {"num_slots": 5, "per_layer": False, "first_slots": [3, 0]}
    cache = ExpertCache(num_layers=2, policy=policy_of("lru"), **slots)
    everyone = [(layer, e) for layer in range(2) for e in range(4)]
    assert cache.fitting(everyone) == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]
    small = [cache.admit((1, e))[0].slot for e in range(4)]
    assert small[:3] == [0, 1, 2]  # each its own
    assert cache.admit((0, 0))[0].slot == 7 - small[3]
    # Of both experts in large slots the one that was used first, though small ones are older.
    assert cache.admit((0, 1))[1][0] == (1, 3)
