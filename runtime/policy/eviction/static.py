"""A fixed set of popular experts, and a few slots for all others."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from predictors.errors import MoecastError
from runtime.policy.eviction.protocol import EvictionOrder, EvictionPolicy, Expert, IsEvictable
from runtime.policy.eviction.recency import RecencyOrder


class FixedSetOrder(RecencyOrder):
    """LRU among the experts outside the set; those inside stay once they are resident.

    When all others are pinned or in flight, because a step misses more experts than there are
    buffers, the least popular expert of the set is evicted rather than that the step waits; it is
    fetched again when it is next requested, in place of an expert outside.
    """

    def __init__(self, num_fixed: int, layers: range) -> None:
        super().__init__()
        self._num_fixed = num_fixed
        self._layers = layers
        self._popularity: dict[Expert, int] = {}
        """Popularity of the experts in the set; empty until the set is known."""
        self._resident: dict[Expert, None] = {}

    def fix(self, uses_LE: NDArray[np.int64]) -> None:
        """Fixes the most used experts of the partition's layers; ties go to the lower id."""
        uses_N = uses_LE[self._layers.start : self._layers.stop].reshape(-1)
        num_experts = uses_LE.shape[1]
        for index in np.argsort(-uses_N, kind="stable")[: self._num_fixed].tolist():
            layer, e = divmod(index, num_experts)
            self._popularity[self._layers.start + layer, e] = int(uses_N[index])
        for expert in self._popularity:
            self._order.pop(expert, None)

    def __contains__(self, expert: Expert) -> bool:
        return expert in self._popularity

    def on_admit(self, expert: Expert) -> None:
        self._resident[expert] = None
        if expert not in self._popularity:
            self._order[expert] = None

    def on_use(self, expert: Expert) -> None:
        if expert in self._order:
            self._order.move_to_end(expert)

    def on_remove(self, expert: Expert) -> None:
        del self._resident[expert]
        self._order.pop(expert, None)

    def clear(self) -> None:
        super().clear()
        self._resident.clear()

    def choose_victim(self, is_evictable: IsEvictable) -> Expert | None:
        outside = super().choose_victim(is_evictable)
        if outside is not None:
            return outside
        members = (e for e in self._popularity if e in self._resident and is_evictable(e))
        return min(members, key=self._popularity.__getitem__, default=None)


class StaticEviction(EvictionPolicy):
    """Keeps a fixed set of experts and a few buffers (ProMoE, section 7.1).

    The baseline "caches a fixed set of experts and utilizes two additional expert buffers to load
    any missing experts". Members of the set are fetched when they are first requested.

    Args:
        num_layers: Layers of the model.
        num_experts: Experts of each layer.
        counts: `[L][E]`, from a trace: the experts with the highest counts are the set. None: for
            `warmup_steps` steps everything is LRU, then the experts that most of these steps
            requested become the set, permanently.
        warmup_steps: Steps before the set is fixed, without counts.
        buffers: Slots for all other experts.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_experts: int,
        counts: Sequence[Sequence[int]] | NDArray[np.int64] | None = None,
        warmup_steps: int = 64,
        buffers: int = 2,
    ):
        if warmup_steps < 1 or buffers < 1:
            raise MoecastError(
                f"static eviction: warmup_steps={warmup_steps}, buffers={buffers}: at least 1 each"
            )
        self._buffers = buffers
        self._orders: list[FixedSetOrder] = []
        self._warmup_steps = warmup_steps
        self._steps = 0
        self._is_fixed = counts is not None
        self._uses_LE = np.zeros((num_layers, num_experts), dtype=np.int64)
        if counts is not None:
            counts_LE = np.array(counts, dtype=np.int64)
            if counts_LE.shape != self._uses_LE.shape:
                raise MoecastError(
                    f"static eviction: counts are {counts_LE.shape}, the model has "
                    f"{num_layers} layers of {num_experts} experts: count again with this model"
                )
            self._uses_LE = counts_LE

    def make_order(self, *, num_slots: int, layers: range) -> EvictionOrder:
        order = FixedSetOrder(max(0, num_slots - self._buffers), layers)
        if self._is_fixed:
            order.fix(self._uses_LE)
        self._orders.append(order)
        return order

    def is_permanent(self, expert: Expert) -> bool:
        return any(expert in order for order in self._orders)

    def on_routed(self, layer: int, tokens_per_expert: Mapping[int, int]) -> None:
        if not self._is_fixed:
            self._uses_LE[layer, list(tokens_per_expert)] += 1

    def end_step(self) -> None:
        if self._is_fixed:
            return
        self._steps += 1
        if self._steps == self._warmup_steps:
            self._is_fixed = True
            for order in self._orders:
                order.fix(self._uses_LE)
