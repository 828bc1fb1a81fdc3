"""The first layers' experts for good, and buffers for the layer that computes."""

import numpy as np

from runtime.policy.eviction.protocol import EvictionOrder, EvictionPolicy, Expert
from runtime.policy.eviction.static import FixedSetOrder


class FirstLayersEviction(EvictionPolicy):
    """Keeps the experts of the first layers permanently (Klotski, section 6.1).

    Device memory stores the "tensors required for current computations and prefetched tensors":
    buffers for all experts of one layer, which a group of batches may request before it computes
    the first, and for the `top_k` hot ones of the next. What memory is left holds "the experts of
    the first" layers. Members of the set are fetched when they are first requested.

    Args:
        num_layers: Layers of the model.
        num_experts: Experts of each layer.
        top_k: Experts that each token is routed to, as many as are prefetched of a layer.
    """

    def __init__(self, *, num_layers: int, num_experts: int, top_k: int):
        self._num_buffers = num_experts + top_k
        layers_left_L = np.arange(num_layers, 0, -1, dtype=np.int64)
        self._rank_LE = np.repeat(layers_left_L[:, None], num_experts, axis=1)
        self._orders: list[FixedSetOrder] = []

    def make_order(self, *, num_slots: int, layers: range) -> EvictionOrder:
        order = FixedSetOrder(max(0, num_slots - self._num_buffers), layers)
        order.fix(self._rank_LE)
        self._orders.append(order)
        return order

    def is_permanent(self, expert: Expert) -> bool:
        return any(expert in order for order in self._orders)
