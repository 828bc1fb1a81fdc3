"""What a cache asks of an eviction policy, and which of the run's events the policy is shown."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Expert = tuple[int, int]
"""(layer, expert)"""

Probabilities = Sequence[float] | NDArray[np.floating]
"""`[E]`: of each expert of a layer."""

Evictable = Callable[[Expert], bool]
"""Whether a resident expert may be dropped now: not pinned, not in flight."""


class Eviction(Protocol):
    """Bookkeeping of one part of an arena: all of it, or one layer's share."""

    def admitted(self, expert: Expert) -> None:
        """The expert has been given a slot, on a prediction or because its router asked."""

    def used(self, expert: Expert) -> None:
        """Its router asked for the expert, and it was resident."""

    def predicted(self, expert: Expert) -> None:
        """A forecast named the expert, and it was resident."""

    def removed(self, expert: Expert) -> None:
        """The expert has left the arena, whoever decided that."""

    def victim(self, evictable: Evictable) -> Expert | None:
        """The resident expert to drop next, or None when none may be dropped."""


class EvictionPolicy:
    """Makes the parts of an arena and keeps what they share; sees each event of the run once.

    `begin_step`, then for each layer forecasts in between and `routed`, then `end_step`. `routed`
    comes before the parts' `used` and `admitted` of the same layer.
    """

    def part(self, *, num_slots: int, layers: range) -> Eviction:
        """Bookkeeping for `num_slots` slots that the experts of `layers` share."""
        raise NotImplementedError

    def begin_step(self, new_request: bool) -> None:
        """A forward pass begins; `new_request`: it is the first of a request."""

    def routed(self, layer: int, tokens_per_expert: Mapping[int, int]) -> None:
        """The layer's router has spoken: each expert that it chose, and for how many tokens."""

    def forecast(self, layer: int, probability_E: Probabilities) -> None:
        """A forecast has been made: chance of each expert that some token of the step needs it."""

    def valued(self, layer: int, value_E: Probabilities) -> None:
        """A learned forecaster says how much each of the layer's experts will be used over the
        coming tokens (`predictors.reuse`), just before `routed`.
        """

    def makes_way(self, victim: Expert, newcomer: Expert) -> bool:  # noqa: ARG002
        """Whether the resident `victim` may be dropped for an expert that is only forecast.

        If not, the forecast waits. What a router has asked for is never kept waiting.
        """
        return True

    def wish(self) -> Expert | None:
        """What is worth most of what is not here, for a link that has nothing else to do.

        None: nothing, or this policy can not tell.
        """
        return None

    def stays(self, expert: Expert) -> bool:  # noqa: ARG002
        """Whether the expert is not to leave where a system drops what it has used."""
        return False

    def end_step(self) -> None:
        """The forward pass is over."""
