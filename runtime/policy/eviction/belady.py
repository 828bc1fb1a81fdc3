"""Farthest next use first: the bound, for replays, where the future is known.

Shape suffixes: L layers, E experts.
"""

from array import array
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from runtime.policy.eviction.protocol import Eviction, EvictionPolicy, Expert
from runtime.policy.eviction.scored import Scored, of_layers

Future = Sequence[Sequence[Collection[int]]]
"""For each step and layer, the experts that the router will choose."""


class NextUseOrder(Scored):
    """An expert counts as needed now until its router has asked for it."""

    def __init__(self, policy: "Belady", *, layers: range):
        scores = of_layers(policy.nearness_LE, layers)
        super().__init__(scores, layers=layers, num_experts=policy.nearness_LE.shape[1])
        self._policy = policy

    def admitted(self, expert: Expert) -> None:
        super().admitted(expert)
        self._policy.asked_for(expert)

    def used(self, expert: Expert) -> None:
        super().used(expert)
        self._policy.asked_for(expert)


class Belady(EvictionPolicy):
    """Belady's MIN over the recorded routing (the oracle of moe-infinity-request-level 7.3).

    Time is counted in routed layers: step * L + layer. Of all policies that fetch only what is
    asked for, none has fewer misses. What is forecast takes only the place of what is needed later.
    """

    def __init__(self, *, num_layers: int, num_experts: int, future: Future):
        self._num_layers = num_layers
        self._never = float(num_layers * (len(future) + 1))
        uses = [[array("q") for _ in range(num_experts)] for _ in range(num_layers)]
        for step, layers in enumerate(future):
            assert len(layers) == num_layers, (step, len(layers), num_layers)
            for layer, chosen in enumerate(layers):
                for e in chosen:
                    uses[layer][e].append(step * num_layers + layer)
        self._uses = uses
        self._next = np.zeros((num_layers, num_experts), dtype=np.int64).tolist()
        """How many of each expert's uses are past."""
        self.nearness_LE = np.full((num_layers, num_experts), -self._never)
        """Minus the time of the next use."""
        for layer in range(num_layers):
            for e in range(num_experts):
                if uses[layer][e]:
                    self.nearness_LE[layer, e] = -uses[layer][e][0]
        self._step = -1
        self._now = -1
        self._chosen: list[Expert] = []
        """By the router that spoke last."""

    def part(self, *, num_slots: int, layers: range) -> Eviction:  # noqa: ARG002
        return NextUseOrder(self, layers=layers)

    def begin_step(self, new_request: bool) -> None:  # noqa: ARG002
        self._step += 1

    def makes_way(self, victim: Expert, newcomer: Expert) -> bool:
        """Only for what is needed sooner: a prefetch never costs more than it brings."""
        return bool(self.nearness_LE[victim] < self.nearness_LE[newcomer])

    def routed(self, layer: int, tokens_per_expert: Mapping[int, int]) -> None:
        self._settle()
        self._now = self._step * self._num_layers + layer
        self._chosen = [(layer, e) for e in tokens_per_expert]
        for expert in self._chosen:
            assert self.nearness_LE[expert] == -self._now, ("not as announced", expert, self._now)

    def end_step(self) -> None:
        self._settle()

    def _settle(self) -> None:
        """What was chosen has been computed, also where this arena was not asked for it because
        the tier above had it.
        """
        for expert in self._chosen:
            self.asked_for(expert)
        self._chosen = []

    def asked_for(self, expert: Expert) -> None:
        """Moves on to the use after the present one, if there is a present one."""
        layer, e = expert
        uses, place = self._uses[layer][e], self._next[layer][e]
        if place == len(uses) or uses[place] > self._now:
            return
        while place < len(uses) and uses[place] <= self._now:
            place += 1
        self._next[layer][e] = place
        self.nearness_LE[layer, e] = -uses[place] if place < len(uses) else -self._never
