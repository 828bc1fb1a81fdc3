"""A fixed set of popular experts, and a few slots for all others."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from predictors.errors import MoecastError
from runtime.policy.eviction.base import EvictionPolicy, Expert, view_scores


class StaticEviction(EvictionPolicy):
    """Keeps a fixed set of experts and a few buffers (ProMoE, section 7.1).

    The baseline "caches a fixed set of experts and utilizes two additional expert buffers to load
    any missing experts". Members of the set are fetched when they are first requested, and stay;
    among all others it is LRU.

    When all others are pinned or in flight, because a step misses more experts than there are
    buffers, the least popular expert of the set is evicted rather than that the step waits; it is
    fetched again when it is next requested, in place of an expert outside.

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
        super().__init__(num_layers=num_layers, num_experts=num_experts)
        self._buffers = buffers
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

    def divide(self, partitions: Sequence[tuple[int, range]]) -> None:
        super().divide(partitions)
        if self._is_fixed:
            self._fix()

    def _fix(self) -> None:
        """Gives scores to the most used experts of each partition; ties go to the lower id."""
        self.score_LE[:] = 0.0
        for num_slots, layers in self.partitions:
            uses_N = self._uses_LE[layers.start : layers.stop].reshape(-1)
            members = np.argsort(-uses_N, kind="stable")[: max(0, num_slots - self._buffers)]
            ascending = members[np.argsort(uses_N[members], kind="stable")]
            view_scores(self.score_LE, layers)[ascending] = np.arange(1, len(ascending) + 1)

    def is_permanent(self, expert: Expert) -> bool:
        return bool(self.score_LE[expert])

    def on_routed(self, layer: int, tokens_per_expert: Mapping[int, int]) -> None:
        if not self._is_fixed:
            self._uses_LE[layer, list(tokens_per_expert)] += 1

    def end_step(self) -> None:
        if self._is_fixed:
            return
        self._steps += 1
        if self._steps == self._warmup_steps:
            self._is_fixed = True
            self._fix()
