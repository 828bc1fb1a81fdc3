"""Least-Stale: experts that the current pass has not touched are evicted first.

Shape suffixes: N = experts of the partition's layers, layer by layer.
"""

from collections.abc import Mapping

import numpy as np

from runtime.policy.eviction.protocol import EvictionOrder, EvictionPolicy, Expert
from runtime.policy.eviction.score_order import ScoreOrder, Scores


class StalenessOrder(ScoreOrder):
    """Stale experts first, then by layer; ties go to the expert admitted first."""

    def __init__(self, policy: "LeastStaleEviction", *, layers: range, num_experts: int):
        super().__init__(self._compute_scores, layers=layers, num_experts=num_experts)
        self._policy = policy
        self._layer_N = np.repeat(np.arange(layers.start, layers.stop), num_experts)
        self._step_N = np.full(len(self._layer_N), -1)

    def _compute_scores(self) -> Scores:
        num_layers, layer_now = self._policy.num_layers, self._policy.layer_now
        layers_ahead_N = (self._layer_N - layer_now - 1) % num_layers
        is_current_N = self._step_N == self._policy.step
        return np.asarray(num_layers * is_current_N - layers_ahead_N, dtype=np.float64)

    def on_admit(self, expert: Expert) -> None:
        super().on_admit(expert)
        self._step_N[self.index(expert)] = self._policy.step

    def on_use(self, expert: Expert) -> None:
        self._step_N[self.index(expert)] = self._policy.step

    def on_predict(self, expert: Expert) -> None:
        self._step_N[self.index(expert)] = self._policy.step


class LeastStaleEviction(EvictionPolicy):
    """SpecMD (arXiv 2602.03921): experts are needed layer by layer, not by recency.

    An expert is stale when the current forward pass has neither used, fetched nor predicted it.
    Stale experts are evicted before current ones; within each group, experts of layers that the
    pass has completed come first, then the layers that are farthest ahead. The paper's pseudo-code
    was not available: this makes its description (current or stale, by position in the pass)
    precise.
    """

    def __init__(self, *, num_layers: int, num_experts: int):
        self.num_layers = num_layers
        self._num_experts = num_experts
        self.step = 0
        self.layer_now = -1
        """The last layer whose router has run in this step."""

    def make_order(self, *, num_slots: int, layers: range) -> EvictionOrder:  # noqa: ARG002
        return StalenessOrder(self, layers=layers, num_experts=self._num_experts)

    def begin_step(self, new_request: bool) -> None:  # noqa: ARG002
        self.step += 1
        self.layer_now = -1

    def on_routed(self, layer: int, tokens_per_expert: Mapping[int, int]) -> None:  # noqa: ARG002
        self.layer_now = layer
