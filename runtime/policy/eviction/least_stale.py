"""Least-Stale: what the current pass has not touched goes before what it has.

Shape suffixes: N = experts of the part's layers, layer by layer.
"""

from collections.abc import Mapping

import numpy as np

from runtime.policy.eviction.protocol import Eviction, EvictionPolicy, Expert
from runtime.policy.eviction.scored import Scored, Scores


class PassOrder(Scored):
    """Ties (same pass, same layer) go to the one admitted first."""

    def __init__(self, policy: "LeastStale", *, layers: range, num_experts: int):
        super().__init__(self._staleness, layers=layers, num_experts=num_experts)
        self._policy = policy
        self._layer_N = np.repeat(np.arange(layers.start, layers.stop), num_experts)
        self._pass_N = np.full(len(self._layer_N), -1)

    def _staleness(self) -> Scores:
        num_layers, layer_now = self._policy.num_layers, self._policy.layer_now
        until_turn_N = (self._layer_N - layer_now - 1) % num_layers
        is_current_N = self._pass_N == self._policy.step
        return np.asarray(num_layers * is_current_N - until_turn_N, dtype=np.float64)

    def admitted(self, expert: Expert) -> None:
        super().admitted(expert)
        self._pass_N[self.place(expert)] = self._policy.step

    def used(self, expert: Expert) -> None:
        self._pass_N[self.place(expert)] = self._policy.step

    def predicted(self, expert: Expert) -> None:
        self._pass_N[self.place(expert)] = self._policy.step


class LeastStale(EvictionPolicy):
    """SpecMD (arXiv 2602.03921): experts are needed layer by layer, not by recency.

    An expert is stale when the current forward pass has neither used, fetched nor predicted it.
    Stale experts go before current ones; within each, those of layers that this pass has behind
    it go before those still to come, the layer whose turn is farthest off first. The paper's
    pseudo-code was not at hand: this is its description, current or stale and by place in the
    pass, made precise.
    """

    def __init__(self, *, num_layers: int, num_experts: int):
        self.num_layers = num_layers
        self._num_experts = num_experts
        self.step = 0
        self.layer_now = -1
        """The last layer whose router has spoken in this step."""

    def part(self, *, num_slots: int, layers: range) -> Eviction:  # noqa: ARG002
        return PassOrder(self, layers=layers, num_experts=self._num_experts)

    def begin_step(self, new_request: bool) -> None:  # noqa: ARG002
        self.step += 1
        self.layer_now = -1

    def routed(self, layer: int, tokens_per_expert: Mapping[int, int]) -> None:  # noqa: ARG002
        self.layer_now = layer
