"""Belady's MIN, with all of the coming routing or some of it: for replays, where it is known.

Shape suffixes: L layers, E experts, A arms.
"""

import itertools
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from predictors.base import Ints
from predictors.errors import MoecastError
from runtime.policy.eviction.base import EvictionPolicy, Expert
from runtime.policy.eviction.regret import ARMS, UseShares

Future = Iterable[Sequence[Collection[int]]]
"""The experts that the router will choose, for each step and layer."""


class BeladyEviction(EvictionPolicy):
    """Belady's MIN over the recorded routing (the oracle of MoE-Infinity, request level, 7.3).

    Time is counted in routed layers: step * L + layer. Of all policies that fetch only what is
    requested, none has fewer misses. A prefetch evicts only experts that are needed later. Idle
    links fetch the missing expert with the next use.

    Args:
        num_layers: Layers of the model.
        num_experts: Experts of each layer.
        future: The routing of all steps.
        known_steps: Steps, the present one included, of which the policy knows the routing; None:
            all. Experts without a known use are evicted first, by the counts of `regret`.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_experts: int,
        future: Future,
        known_steps: int | None = None,
    ):
        if known_steps is not None and known_steps < 1:
            raise MoecastError(f"belady eviction: known_steps={known_steps}: must be at least 1")
        super().__init__(num_layers=num_layers, num_experts=num_experts)
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
        self._known_steps = num_steps if known_steps is None else known_steps
        self._shares = None
        self._share_LEA = np.zeros((num_layers, num_experts, len(ARMS)))
        """The shares by every arm when the layer was last routed."""
        if known_steps is not None:
            self._shares = UseShares(num_layers=num_layers, num_experts=num_experts)
        self._num_past = np.zeros((num_layers, num_experts), dtype=np.int64).tolist()
        """Uses of each expert that are past."""
        # Minus the time of the next use; without a known use, at most `-never`.
        self.score_LE[:] = -self._never
        self._routing = enumerate(future)
        """The steps that are not known yet, with their numbers."""
        self._learn(self._known_steps)
        self._step = -1
        self._now = -1
        self._chosen: list[Expert] = []
        """Experts that the router that ran last has chosen."""

    def divide(self, partitions: Sequence[tuple[int, range]]) -> None:
        super().divide(partitions)
        if self._shares is not None:
            self._shares.divide(partitions)

    def begin_step(self, requests_T: Ints) -> None:  # noqa: ARG002
        if self._shares is not None:
            self._shares.begin_step()
        self._step += 1
        if self._step:
            self._learn(1)

    def _learn(self, num_steps: int) -> None:
        """Makes the routing of the next unknown steps known."""
        for step, layers in itertools.islice(self._routing, num_steps):
            for layer, chosen in enumerate(layers):
                for e in chosen:
                    if self.score_LE[layer, e] <= -self._never:
                        self.score_LE[layer, e] = -(step * self._num_layers + layer)

    def may_evict_for(self, victim: Expert, newcomer: Expert) -> bool:
        return bool(self.score_LE[victim] < self.score_LE[newcomer])

    def on_routed(self, layer: int, tokens_per_expert: Mapping[int, int]) -> None:
        self._advance_chosen()
        self._now = self._step * self._num_layers + layer
        self._chosen = [(layer, e) for e in tokens_per_expert]
        if self._shares is not None:
            self._shares.on_routed(layer, tokens_per_expert)
            self._share_LEA[layer] = self._shares.of_all_arms(layer)
            nearness_E = self.score_LE[layer]
            unknown_E = self._unknown_nearness(layer)
            nearness_E[:] = np.where(nearness_E <= -self._never, unknown_E, nearness_E)
        for expert in self._chosen:
            assert self.score_LE[expert] == -self._now, ("not as announced", expert, self._now)

    def _unknown_nearness(self, layer: int) -> NDArray[np.float64]:
        """Returns `[E]`: the scores of a layer's experts without a known use."""
        if self._shares is None:
            return np.full(self.score_LE.shape[1], -self._never)
        return self._share_LEA[layer, :, self._shares.arm] - 1.0 - self._never

    def next_idle_candidate(self) -> Expert | None:
        return self.find_best_absent(self.score_LE, -self._never)

    def end_step(self) -> None:
        self._advance_chosen()
        if self._shares is not None:
            self._shares.end_step()

    def _advance_chosen(self) -> None:
        """Advances what was computed, even if a tier above had it and this one saw no request."""
        for expert in self._chosen:
            self._advance(expert)
        self._chosen = []

    def on_admit(self, expert: Expert) -> None:
        super().on_admit(expert)
        self._advance(expert)

    def on_use(self, expert: Expert) -> None:
        super().on_use(expert)
        self._advance(expert)

    def _advance(self, expert: Expert) -> None:
        """Moves on to the use after the present one, if there is a present one."""
        layer, e = expert
        uses, num_past = self._uses[layer][e], self._num_past[layer][e]
        if num_past == len(uses) or uses[num_past] > self._now:
            return
        while num_past < len(uses) and uses[num_past] <= self._now:
            num_past += 1
        self._num_past[layer][e] = num_past
        end = (self._step + self._known_steps) * self._num_layers
        if num_past < len(uses) and uses[num_past] < end:
            self.score_LE[layer, e] = -uses[num_past]
        else:
            self.score_LE[layer, e] = self._unknown_nearness(layer)[e]
