"""Klotski's memory: the first layers for good, and a window of layers ahead of the computation.

Shape suffixes: L layers, E experts.
"""

from collections.abc import Callable, Mapping

import numpy as np

from predictors.base import Ints
from runtime.policy.eviction.base import EvictionPolicy, Expert
from runtime.policy.eviction.static import StaticEviction

NOT_AHEAD = -np.inf
"""Idle score of experts that the window does not fetch."""


class FirstLayersEviction(StaticEviction):
    """Keeps the experts of the first layers permanently (Klotski, section 6.1).

    Device memory stores the "tensors required for current computations and prefetched tensors":
    buffers for as many experts of one layer as the step's tokens can be routed to, which a group
    of batches may request before it computes the first, and for the `top_k` hot ones of the next.
    What memory is left holds "the experts of the first" layers: more of them in a step of few
    tokens. Members of the set are fetched when they are first requested.

    Args:
        num_layers: Layers of the model.
        num_experts: Experts of each layer.
        top_k: Experts that each token is routed to, as many as are prefetched of a layer.
    """

    def __init__(self, *, num_layers: int, num_experts: int, top_k: int):
        layers_left_L = np.arange(num_layers, 0, -1, dtype=np.int64)
        super().__init__(
            num_layers=num_layers,
            num_experts=num_experts,
            counts=np.repeat(layers_left_L[:, None], num_experts, axis=1),
            buffers=num_experts + top_k,
        )
        self._top_k = top_k

    def begin_step(self, requests_T: Ints) -> None:
        num_routed = min(self._num_experts, len(requests_T) * self._top_k)
        if num_routed + self._top_k != self._buffers:
            self._buffers = num_routed + self._top_k
            self._fix()


class LayerWindowEviction(EvictionPolicy):
    """Holds the layers that are computed next (Klotski, section 6.1).

    The score is the negative distance in layers to the next use.

    "As the computation proceeds to layer i, the GPU prefetches tensors for layer i + 1 from CPU
    memory, while the CPU prefetches tensors for layer i + L from the disk and removes tensors for
    layer i." L is the number of layers that fit. After the last layer comes the first, of the next
    step. Experts are fetched while the link is idle, those of the nearest layer first, in place of
    those that are used last: experts of the computing layer that no token was routed to, and layers
    that have been computed. The routed experts of the computing layer stay until the next layer is
    routed, since the tier above still copies them.

    Args:
        num_layers: Layers of the model.
        num_experts: Experts of each layer.
        is_held_elsewhere: Whether the tier above holds the expert permanently, or it belongs to
            another device; such experts are not fetched ahead and are evicted first.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_experts: int,
        is_held_elsewhere: Callable[[Expert], bool] = lambda _: False,
    ):
        super().__init__(num_layers=num_layers, num_experts=num_experts)
        self._is_held_elsewhere = is_held_elsewhere
        self._held_LE = np.zeros((num_layers, num_experts), dtype=bool)
        self._idle_LE = np.zeros((num_layers, num_experts))
        """The score of experts to fetch ahead, `NOT_AHEAD` of all others."""

    def begin_step(self, requests_T: Ints) -> None:  # noqa: ARG002
        for expert in np.ndindex(*self._held_LE.shape):  # what the tier above keeps has changed
            self._held_LE[expert] = self._is_held_elsewhere(expert)
        self._move_to(0)

    def on_routed(self, layer: int, tokens_per_expert: Mapping[int, int]) -> None:
        self._move_to(layer)
        unused_E = np.ones(self._num_experts, dtype=bool)
        unused_E[list(tokens_per_expert)] = False
        self.score_LE[layer, unused_E] = -self._num_layers
        self._idle_LE[layer] = NOT_AHEAD

    def end_step(self) -> None:
        self._move_to(0)

    def _move_to(self, layer: int) -> None:
        """Makes the layer the first of the window."""
        self.score_LE[:] = -((np.arange(self._num_layers) - layer) % self._num_layers)[:, None]
        self.score_LE[self._held_LE] = -self._num_layers
        self._idle_LE[:] = np.where(self._held_LE, NOT_AHEAD, self.score_LE)

    def may_evict_for(self, victim: Expert, newcomer: Expert) -> bool:
        return bool(self.score_LE[victim] < self.score_LE[newcomer])

    def next_idle_candidate(self) -> Expert | None:
        return self.find_best_absent(self._idle_LE, NOT_AHEAD)
