"""A fixed set of popular experts, and a few slots for all others."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from predictors.errors import MoecastError
from runtime.policy.eviction.lru import RecencyOrder
from runtime.policy.eviction.protocol import Evictable, Eviction, EvictionPolicy, Expert


class FixedSet(RecencyOrder):
    """LRU among the experts outside the set; those inside stay once they have come.

    When all those outside are pinned or in flight, because a step misses more experts than there
    are buffers, the least popular of the set goes, rather than that the step waits; it is fetched
    again when it is next asked for, in place of an expert outside.
    """

    def __init__(self, num_fixed: int, layers: range) -> None:
        super().__init__()
        self._num_fixed = num_fixed
        self._layers = layers
        self._popularity: dict[Expert, int] = {}
        """Of the experts in the set; empty until it is known."""
        self._resident: dict[Expert, None] = {}

    def fix(self, uses_LE: NDArray[np.int64]) -> None:
        """Takes the most used experts of the part's layers; ties go to the lower id."""
        uses_N = uses_LE[self._layers.start : self._layers.stop].reshape(-1)
        num_experts = uses_LE.shape[1]
        for place in np.argsort(-uses_N, kind="stable")[: self._num_fixed].tolist():
            layer, e = divmod(place, num_experts)
            self._popularity[self._layers.start + layer, e] = int(uses_N[place])
        for expert in self._popularity:
            self._order.pop(expert, None)

    def __contains__(self, expert: Expert) -> bool:
        return expert in self._popularity

    def admitted(self, expert: Expert) -> None:
        self._resident[expert] = None
        if expert not in self._popularity:
            self._order[expert] = None

    def used(self, expert: Expert) -> None:
        if expert in self._order:
            self._order.move_to_end(expert)

    def predicted(self, expert: Expert) -> None:
        self.used(expert)

    def removed(self, expert: Expert) -> None:
        del self._resident[expert]
        self._order.pop(expert, None)

    def victim(self, evictable: Evictable) -> Expert | None:
        loose = super().victim(evictable)
        if loose is not None:
            return loose
        members = (e for e in self._popularity if e in self._resident and evictable(e))
        return min(members, key=self._popularity.__getitem__, default=None)


class Static(EvictionPolicy):
    """promoe 7.1: "caches a fixed set of experts and utilizes two additional expert buffers to load
    any missing experts".

    The set is the experts with the highest `counts` (`[L][E]`, from a trace). Without counts it is
    learned: for `warmup_steps` steps everything is LRU, then the experts that most of those steps
    asked for become the set, for good. Members are fetched when they are first asked for.

    With `first_layers` the set is the experts of the lowest layers: klotski 6.1, where what memory
    is left holds "the experts of the first three layers". With `whole_layer` there are buffers for
    one layer's experts and some of the next at least: a group of batches may ask for all of them
    before it computes the first, and whatever is short of that pushes members out.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_experts: int,
        counts: Sequence[Sequence[int]] | None = None,
        warmup_steps: int = 64,
        buffers: int = 2,
        first_layers: bool = False,
        whole_layer: bool = False,
    ):
        if warmup_steps < 1 or buffers < 1:
            raise MoecastError(
                f"static eviction: warmup_steps={warmup_steps}, buffers={buffers}: at least 1 each"
            )
        if first_layers:
            if counts is not None:
                raise MoecastError("static eviction: first_layers or counts, not both")
            counts = [[num_layers - layer] * num_experts for layer in range(num_layers)]
        if whole_layer:
            buffers = max(buffers, num_experts + num_experts // 8 + 1)
        self._buffers = buffers
        self._parts: list[FixedSet] = []
        self._warmup_steps = warmup_steps
        self._steps = 0
        self._fixed = counts is not None
        self._uses_LE = np.zeros((num_layers, num_experts), dtype=np.int64)
        if counts is not None:
            given = np.array(counts, dtype=np.int64)
            if given.shape != self._uses_LE.shape:
                raise MoecastError(
                    f"static eviction: counts are {given.shape}, the model has "
                    f"{num_layers} layers of {num_experts} experts: count again with this model"
                )
            self._uses_LE = given

    def part(self, *, num_slots: int, layers: range) -> Eviction:
        part = FixedSet(max(0, num_slots - self._buffers), layers)
        if self._fixed:
            part.fix(self._uses_LE)
        self._parts.append(part)
        return part

    def stays(self, expert: Expert) -> bool:
        return any(expert in part for part in self._parts)

    def routed(self, layer: int, tokens_per_expert: Mapping[int, int]) -> None:
        if not self._fixed:
            self._uses_LE[layer, list(tokens_per_expert)] += 1

    def end_step(self) -> None:
        if self._fixed:
            return
        self._steps += 1
        if self._steps == self._warmup_steps:
            self._fixed = True
            for part in self._parts:
                part.fix(self._uses_LE)
