"""Belady's MIN, the bound: for replays, where the future is known.

Shape suffixes: L layers, E experts.
"""

from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from runtime.policy.eviction.protocol import EvictionOrder, EvictionPolicy, Expert
from runtime.policy.eviction.score_order import ScoreOrder, view_scores

Future = Iterable[Sequence[Collection[int]]]
"""The experts that the router will choose, for each step and layer."""


class NextUseOrder(ScoreOrder):
    """Farthest next use first; an expert is needed now until its router has requested it."""

    def __init__(self, policy: "BeladyEviction", *, layers: range):
        scores = view_scores(policy.nearness_LE, layers)
        super().__init__(scores, layers=layers, num_experts=policy.nearness_LE.shape[1])
        self._policy = policy

    def on_admit(self, expert: Expert) -> None:
        super().on_admit(expert)
        self._policy.advance(expert)

    def on_use(self, expert: Expert) -> None:
        super().on_use(expert)
        self._policy.advance(expert)


class BeladyEviction(EvictionPolicy):
    """Belady's MIN over the recorded routing (the oracle of MoE-Infinity, request level, 7.3).

    Time is counted in routed layers: step * L + layer. Of all policies that fetch only what is
    requested, none has fewer misses. A prefetch evicts only experts that are needed later.
    """

    def __init__(self, *, num_layers: int, num_experts: int, future: Future):
        self._num_layers = num_layers
        uses = [[array("q") for _ in range(num_experts)] for _ in range(num_layers)]
        num_steps = 0
        for step, layers in enumerate(future):
            num_steps += 1
            assert len(layers) == num_layers, (step, len(layers), num_layers)
            for layer, chosen in enumerate(layers):
                for e in chosen:
                    uses[layer][e].append(step * num_layers + layer)
        self._never = float(num_layers * (num_steps + 1))
        self._uses = uses
        self._num_past = np.zeros((num_layers, num_experts), dtype=np.int64).tolist()
        """Uses of each expert that are past."""
        self.nearness_LE = np.full((num_layers, num_experts), -self._never)
        """Minus the time of the next use."""
        for layer in range(num_layers):
            for e in range(num_experts):
                if uses[layer][e]:
                    self.nearness_LE[layer, e] = -uses[layer][e][0]
        self._step = -1
        self._now = -1
        self._chosen: list[Expert] = []
        """Experts that the router that ran last has chosen."""

    def make_order(self, *, num_slots: int, layers: range) -> EvictionOrder:  # noqa: ARG002
        return NextUseOrder(self, layers=layers)

    def begin_step(self, new_request: bool) -> None:  # noqa: ARG002
        self._step += 1

    def may_evict_for(self, victim: Expert, newcomer: Expert) -> bool:
        return bool(self.nearness_LE[victim] < self.nearness_LE[newcomer])

    def on_routed(self, layer: int, tokens_per_expert: Mapping[int, int]) -> None:
        self._advance_chosen()
        self._now = self._step * self._num_layers + layer
        self._chosen = [(layer, e) for e in tokens_per_expert]
        for expert in self._chosen:
            assert self.nearness_LE[expert] == -self._now, ("not as announced", expert, self._now)

    def end_step(self) -> None:
        self._advance_chosen()

    def _advance_chosen(self) -> None:
        """Advances what was computed, even if a tier above had it and this one saw no request."""
        for expert in self._chosen:
            self.advance(expert)
        self._chosen = []

    def advance(self, expert: Expert) -> None:
        """Moves on to the use after the present one, if there is a present one."""
        layer, e = expert
        uses, num_past = self._uses[layer][e], self._num_past[layer][e]
        if num_past == len(uses) or uses[num_past] > self._now:
            return
        while num_past < len(uses) and uses[num_past] <= self._now:
            num_past += 1
        self._num_past[layer][e] = num_past
        self.nearness_LE[layer, e] = -uses[num_past] if num_past < len(uses) else -self._never
