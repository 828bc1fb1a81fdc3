"""The cache with every policy, through any order of events: slots, shares, pins, quarantine."""

import random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from runtime.policy.cache import ExpertCache
from runtime.policy.eviction.registry import EVICTIONS, make_eviction_policy
from tests.builders.arena import random_routing

LAYERS, EXPERTS, SLOTS, STEPS = 3, 6, 8, 60
EXAMPLES, EXAMPLE_STEPS = 10, 50
"""Of each of the 22 machines: more than 10,000 steps."""


class Machine(RuleBasedStateMachine):
    """Follows a routing step by step, so that Belady can know it, with anything in between."""

    name = "lru"
    per_layer = True

    @initialize(seed=st.integers(0, 2**16))
    def build(self, seed):
        self.routing = random_routing(seed, steps=STEPS, layers=LAYERS, experts=EXPERTS, top_k=2)
        options = {"future": self.routing} if self.name == "belady" else {}
        if self.name == "static":
            options = {"warmup_steps": 3}
        policy = make_eviction_policy(
            self.name, num_layers=LAYERS, num_experts=EXPERTS, options=options
        )
        self.cache = ExpertCache(
            num_slots=SLOTS, num_layers=LAYERS, per_layer=self.per_layer, policy=policy
        )
        self.random = random.Random(seed)
        self.step = self.layer = -1
        self.lost: dict[int, int] = {}
        """Slot in quarantine to the layer that it belonged to."""

    def shares(self) -> list[int]:
        return [3, 3, 2] if self.per_layer else [SLOTS] * LAYERS

    def free_for(self, layer: int) -> int:
        mine = [e for e in self.cache.entries if not self.per_layer or e[0] == layer]
        lost = [at for at in self.lost.values() if not self.per_layer or at == layer]
        return self.shares()[layer] - len(mine) - len(lost)

    def try_to_admit(self, expert):
        before = dict(self.cache.entries)
        free = self.free_for(expert[0])
        may_go = {
            other
            for other, entry in before.items()
            if not (entry.pins or entry.in_flight) and (not self.per_layer or other[0] == expert[0])
        }
        entry, dropped = self.cache.admit(expert)
        if free:
            assert entry is not None
            assert dropped is None
        elif may_go:
            assert entry is not None, "granted whenever something may be dropped"
            assert dropped is not None
            assert dropped[0] in may_go
            assert dropped[1] is before[dropped[0]]
        else:
            assert (entry, dropped) == (None, None)
        left = set(before) - ({dropped[0]} if dropped else set())
        assert set(self.cache) == left | ({expert} if entry else set())
        return entry

    def any_of(self, condition):
        """Some expert in the arena whose entry fits, or None."""
        experts = sorted(e for e, entry in self.cache.entries.items() if condition(entry))
        return self.random.choice(experts) if experts else None

    @rule()
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
                self.cache.on_use(expert)
            if entry is not None:
                entry.pins += 1
        for (layer, _), entry in self.cache.entries.items():
            if layer != self.layer:
                entry.pins = 0

    @rule(layer=st.integers(0, LAYERS - 1), e=st.integers(0, EXPERTS - 1))
    def predict(self, layer, e):
        chance_E = [self.random.random() for _ in range(EXPERTS)]
        self.cache.policy.on_forecast(layer, chance_E, chance_E)
        if self.cache.entries.get((layer, e)) is not None:
            self.cache.on_predict((layer, e))
        else:
            entry = self.try_to_admit((layer, e))
            if entry is not None:
                entry.in_flight = self.random.random() < 0.5

    @rule()
    def start_a_transfer(self):
        if (expert := self.any_of(lambda entry: not entry.in_flight)) is not None:
            self.cache.entries.get(expert).in_flight = True

    @rule()
    def end_the_transfers(self):
        for entry in self.cache.entries.values():
            entry.in_flight = False

    @rule()
    def compute(self):
        for (layer, _), entry in self.cache.entries.items():
            if layer == self.layer and entry.pins:
                entry.pins -= 1

    @rule()
    def drop(self):
        expert = self.any_of(lambda entry: not (entry.pins or entry.in_flight))
        if expert is not None:
            self.cache.remove(expert)

    @precondition(lambda self: len(self.lost) < 2)
    @rule()
    def hang(self):
        if (expert := self.any_of(lambda entry: entry.in_flight)) is not None:
            slot = self.cache.entries.get(expert).slot
            assert self.cache.quarantine(expert) == slot
            self.lost[slot] = expert[0]

    @precondition(lambda self: self.lost)
    @rule()
    def recover(self):
        slot = self.random.choice(sorted(self.lost))
        self.cache.restore(slot)
        del self.lost[slot]

    @invariant()
    def slots_are_free_or_used_or_lost(self):
        if not hasattr(self, "cache"):
            return
        used = [entry.slot for entry in self.cache.entries.values()]
        assert len(set(used) | set(self.lost)) == len(used) + len(self.lost) <= SLOTS
        assert all(0 <= slot < SLOTS for slot in used)
        for layer, share in enumerate(self.shares()):
            mine = sum(expert[0] == layer for expert in self.cache)
            lost = sum(not self.per_layer or at == layer for at in self.lost.values())
            assert self.cache.share(layer) == share - lost
            assert mine <= share - lost


@pytest.mark.parametrize("per_layer", [True, False])
@pytest.mark.parametrize("name", sorted(EVICTIONS))
def test_cache__invariants_hold_with_every_policy(name, per_layer):
    machine = type("Machine", (Machine,), {"name": name, "per_layer": per_layer})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=EXAMPLES, stateful_step_count=EXAMPLE_STEPS, deadline=None, database=None
        ),
    )
