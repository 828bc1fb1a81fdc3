"""The interface between a cache and its eviction policy."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from predictors.base import Ints

if TYPE_CHECKING:
    from runtime.policy.eviction.score_order import ScoreOrder

Expert = tuple[int, int]
"""(layer, expert)"""

Probabilities = Sequence[float] | NDArray[np.floating]
"""`[E]`: a number for each expert of a layer."""

IsEvictable = Callable[[Expert], bool]
"""Whether a resident expert may be evicted now: not pinned, not in flight."""


class EvictionPolicy:
    """Makes the orders of a cache's partitions and keeps what they share.

    It sees each event of a step once: `begin_step`, then `on_routed` for each layer with forecasts
    in between, then `end_step`. `on_routed` comes before `on_use` and `on_admit` of the same layer.

    Shape suffixes: T tokens of the step, K top_k, E experts.
    """

    def __init__(self, *, num_layers: int = 0, num_experts: int = 0) -> None:
        """Makes a policy for a model of so many layers, each of so many experts."""

    def make_order(self, *, num_slots: int, layers: range) -> "ScoreOrder":
        """Makes the order of `num_slots` slots that the experts of `layers` share."""
        raise NotImplementedError

    def begin_step(self, requests_T: Ints) -> None:
        """Starts a forward pass.

        Args:
            requests_T: The request of each token. An id that was not seen before begins a request;
                its end is not signalled (`predictors.requests.LiveRequests`).
        """

    def on_tokens_routed(self, layer: int, experts_TK: Ints) -> None:
        """Records the experts of each token, in the order of `requests_T`.

        It comes just before `on_routed` of the same layer, whose `tokens_per_expert` is the sum
        over all tokens and, where several devices share the experts, holds this device's only. A
        layer whose router is not observed has no such event. The id E stands for no choice.
        """

    def on_routed(self, layer: int, tokens_per_expert: Mapping[int, int]) -> None:
        """Records the experts that the layer's router has chosen and their numbers of tokens."""

    def on_forecast(self, layer: int, probability_E: Probabilities, order_E: Probabilities) -> None:
        """Records a forecast.

        Args:
            layer: Its target.
            probability_E: The probability of each expert that some token needs it.
            order_E: What prefetches are ordered by (`Forecast.order_E`).
        """

    def on_reuse_scores(self, layer: int, score_1E: Probabilities) -> None:
        """Records predictions of the experts' use by the coming tokens.

        They come just before `on_routed` of the same layer, or after it if nothing had to be
        evicted for what it chose: one row, from `predictors.reuse`.
        """

    def end_step(self) -> None:
        """Ends the forward pass."""

    def may_evict_for(self, victim: Expert, newcomer: Expert) -> bool:  # noqa: ARG002
        """Returns whether `victim` may be evicted for a prefetch of `newcomer`.

        If not, the prefetch waits. Requests of routers never wait.
        """
        return True

    def next_idle_candidate(self) -> Expert | None:
        """Returns the missing expert with the highest score, for an idle link to fetch.

        None if there is none or the policy has no such scores.
        """
        return None

    def is_permanent(self, expert: Expert) -> bool:  # noqa: ARG002
        """Returns whether the expert stays where a system evicts experts after their use."""
        return False
