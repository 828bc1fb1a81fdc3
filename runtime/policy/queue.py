"""The transfer queue: experts that the link has to transfer, in two priorities."""

import math
from collections.abc import Container

from predictors.errors import MoecastError, unknown
from runtime.policy.eviction.base import Expert

PREFETCH_ORDERS = (
    "push-order",
    "nearest-layer",
    "probability",
    "probability-over-distance",
    "layer-decay",
)
"""Orders of the predicted experts in a queue; ties go to the one pushed first."""
PUSH_ORDER, NEAREST_LAYER, PROBABILITY, PROBABILITY_OVER_DISTANCE, LAYER_DECAY = range(5)


def find_prefetch_order(name: str) -> int:
    """Returns the number of the order of that name.

    Raises:
        MoecastError: There is none.
    """
    if name not in PREFETCH_ORDERS:
        raise MoecastError(unknown("priority", name, PREFETCH_ORDERS))
    return PREFETCH_ORDERS.index(name)


def prefetch_key(order: int, probability: float, ahead: int, num_layers: int) -> float:
    """Returns the key of a predicted expert; the smallest comes first.

    Args:
        order: The number of one of `PREFETCH_ORDERS`.
        probability: The forecast's order of the expert, at most 1.
        ahead: The next layer to be routed is 1 ahead; one that has been routed is ahead by the rest
            of the step and its own.
        num_layers: Layers with routed experts.
    """
    if order == NEAREST_LAYER:  # by layer, then by probability
        return 2 * ahead - probability
    if order == PROBABILITY:  # MoE-Infinity (request level), table 4, no layer proximity
        return -probability
    if order == PROBABILITY_OVER_DISTANCE:  # largest first (fMoE, section 4.5)
        return -probability / ahead
    if order == LAYER_DECAY:
        # Largest first (MoE-Infinity (sequence level), section 5.2, and algorithm 1, step 26;
        # (request level), section 5.1).
        return -probability * (1.0 - ahead / num_layers)
    return 0.0  # first in, first out (ProMoE, algorithm 2, line 7)


class TransferQueue:
    """Experts with chunks still to transfer: high in order of arrival, then low in `order`.

    An expert is in the queue once: pushed high, it leaves the low side (a join, not a repeat).
    Behind all forecast experts come those for idle links.

    Args:
        order: The number of one of `PREFETCH_ORDERS`.
        num_layers: Layers with routed experts.
    """

    def __init__(self, order: int, *, num_layers: int) -> None:
        self._order = order
        self._goes_by_distance = order not in (PUSH_ORDER, PROBABILITY)
        """The keys depend on the layers ahead, so they change when a layer is routed."""
        self._num_layers = num_layers
        self._layer_now = -1
        self._high: dict[Expert, None] = {}
        self._low: dict[Expert, tuple[float | None, int]] = {}
        """Probability of each predicted expert, and the number of its push; one that is pushed
        again keeps it."""
        self.requested = self._high.keys()
        """The high-priority experts in transfer order; a view."""
        self.predicted = self._low.keys()
        """The low-priority experts; a view."""
        self._ordered: list[Expert] = []
        """The low-priority experts in transfer order, with those that have left since."""
        self._is_outdated = False
        """Their order is that of an earlier layer or push."""
        self._num_pushed = 0

    def __len__(self) -> int:
        return len(self._high) + len(self._low)

    def advance(self, layer_now: int) -> None:
        """Orders predicted experts by their distance from `layer_now`.

        It is the last layer whose router has run; -1 when a step begins.
        """
        if layer_now != self._layer_now:
            self._layer_now = layer_now
            self._is_outdated = self._is_outdated or self._goes_by_distance

    def push_high(self, expert: Expert) -> None:
        """Adds an expert that a router has chosen, after those chosen earlier."""
        if expert in self._low:
            del self._low[expert]
        self._high.setdefault(expert)

    def push_low(self, expert: Expert, probability: float | None) -> None:
        """Adds a predicted expert; the last forecast counts.

        Args:
            probability: Its importance within a layer, at most 1; None: no forecast names it, it
                comes behind all others.
        """
        if expert in self._high:
            return
        queued = self._low.get(expert)
        if queued is None:
            self._low[expert] = probability, self._num_pushed
            self._num_pushed += 1
        else:
            self._low[expert] = probability, queued[1]
        self._is_outdated = True

    def remove(self, expert: Expert) -> None:
        if expert in self._high:
            del self._high[expert]
        elif expert in self._low:
            del self._low[expert]

    def clear(self) -> None:
        self._high.clear()
        self._low.clear()

    def remove_low_of_layer(self, layer: int, keep: Container[int] = ()) -> list[Expert]:
        """Removes a layer's low-priority experts (ProMoE, algorithm 2, line 12), but `keep`."""
        if not self._low:
            return []
        removed = [expert for expert in self._low if expert[0] == layer and expert[1] not in keep]
        for expert in removed:
            del self._low[expert]
        return removed

    def is_low(self, expert: Expert) -> bool:
        return expert in self._low

    def probability(self, expert: Expert) -> float | None:
        """Returns the probability that a queued predicted expert was last pushed with."""
        return self._low[expert][0]

    def low(self) -> list[Expert]:
        """Returns the low-priority experts in transfer order."""
        if self._is_outdated:
            self._is_outdated = False
            self._ordered = sorted(self._low, key=self._place)
        elif len(self._ordered) > len(self._low):
            self._ordered = [expert for expert in self._ordered if expert in self._low]
        return self._ordered

    def _place(self, expert: Expert) -> tuple[float, int]:
        probability, ticket = self._low[expert]
        if probability is None:
            return math.inf, ticket
        # A layer that has been routed comes next in the step after this one.
        layers_ahead = (expert[0] - self._layer_now - 1) % self._num_layers + 1
        return prefetch_key(self._order, probability, layers_ahead, self._num_layers), ticket
