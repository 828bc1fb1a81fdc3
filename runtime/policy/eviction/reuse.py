"""Eviction by predicted reuse: forecasts of this step, then the use by the coming tokens.

Shape suffixes: L layers, E experts, N = experts of a partition's layers, layer by layer.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from runtime.policy.eviction.decayed_lfu import DECAYS, MEMORY, DecayedLfuEviction, ShadowCache
from runtime.policy.eviction.protocol import EvictionOrder, EvictionPolicy, Expert, Probabilities
from runtime.policy.eviction.score_order import ScoreOrder, Scores, view_scores

LEAST_IDLE_SCORE = 0.03
"""Share of the coming tokens that must use an expert for idle link time to be spent on it."""

SLOW = DECAYS.index(0.98)
"""The decay of the counts that are mixed into predictions."""
SLOW_WEIGHT = 0.6
MAX_SLOW_WEIGHT = 0.3
"""Weight of those counts, per share of all experts that the cache holds, and its maximum:
predictions look a few tokens ahead, and a large cache keeps experts for tens. In replays .15 saved
1 to 4 % of the time per output token at 25 and 50 % and added 2 % at 10 %."""

MARGIN = 0.02
"""Share by which counting must hit more: the best of several decays wins by chance otherwise."""

NOT_IDLE = -1.0
"""Score of experts that are not fetched in idle time; below all others."""


class ReuseEviction(EvictionPolicy):
    """Evicts the expert with the lowest predicted use. Ours.

    The value of an expert is the share of the coming tokens that use it, as `predictors.reuse` last
    predicted, the next tokens counting most, mixed with a little of its share of the past ones.

    Experts of a layer that this step has yet to reach score `p + (1 - p) value`: `p` is the
    forecast that some token of the step needs the expert. Without a forecast, in a long step (whose
    tokens choose more often than a layer has experts), `p` is what balanced routing gives, so that
    a prefill keeps what its later layers are sure to need and evicts what its earlier ones have
    used. All other experts score their value.

    Without a reuse predictor the value is the decayed share of past steps, as it is where counting
    has hit more lately: shadow caches in a few layers run both on the same routing.
    """

    def __init__(self, *, num_layers: int, num_experts: int):
        self._num_experts = num_experts
        self._counts = DecayedLfuEviction(num_layers=num_layers, num_experts=num_experts)
        self._shadows = {layer: ShadowCache(num_experts, 1) for layer in self._counts.shadows}
        self._hits = 0.0
        """Hits of the shadow caches under the predictions; decays as those of `_counts` do."""
        self._predicted_LE = np.zeros((num_layers, num_experts))
        """The last predictions."""
        self._is_predicted_L = np.zeros(num_layers, dtype=bool)
        self._value_LE = np.zeros((num_layers, num_experts))
        self._score_LE = np.zeros((num_layers, num_experts))
        self._idle_score_LE = np.zeros((num_layers, num_experts))
        """Scores for fetching in idle time: the value, or NOT_IDLE where a forecast of this step
        already decides what to fetch of the layer."""
        self._is_forecast_L = np.zeros(num_layers, dtype=bool)
        self._layer_now = -1
        """The last layer whose router has run in this step."""
        self._is_long = False
        """The step's tokens choose more often in a layer than it has experts: a prefill."""
        self._orders: list[ReuseOrder] = []
        self._slow_weight = 0.0
        self.trusts_predictor = True
        """Whether the predictions decide, where there are any."""

    def make_order(self, *, num_slots: int, layers: range) -> EvictionOrder:
        self._counts.make_order(num_slots=num_slots, layers=layers)
        for layer, shadow in self._shadows.items():
            shadow.num_slots = self._counts.shadows[layer].num_slots
        order = ReuseOrder(
            self._score_LE, self._idle_score_LE, layers=layers, num_experts=self._num_experts
        )
        self._orders.append(order)
        share = num_slots / self._score_LE.size
        self._slow_weight = min(MAX_SLOW_WEIGHT, self._slow_weight + SLOW_WEIGHT * share)
        return order

    def begin_step(self, new_request: bool) -> None:
        self._counts.begin_step(new_request)
        self._layer_now = -1
        self._is_long = False
        self._is_forecast_L[:] = False
        self._score_LE[:] = self._value_LE
        self._idle_score_LE[:] = self._value_LE

    def on_forecast(self, layer: int, probability_E: Probabilities) -> None:
        if layer > self._layer_now:
            self._is_forecast_L[layer] = True
            self._score_LE[layer] = self._score_ahead(np.asarray(probability_E), layer)
            self._idle_score_LE[layer] = NOT_IDLE

    def _score_ahead(self, probability_E: NDArray | float, layer: int) -> NDArray:
        """Returns `[E]`: scores of a layer that this step has yet to reach."""
        return probability_E + (1.0 - probability_E) * self._value_LE[layer]

    def on_reuse_scores(self, layer: int, score_E: Probabilities) -> None:
        self._is_predicted_L[layer] = True
        self._predicted_LE[layer] = score_E

    def on_routed(self, layer: int, tokens_per_expert: Mapping[int, int]) -> None:
        self._counts.on_routed(layer, tokens_per_expert)
        mixed_E = self._mix_predictions(layer) if self._is_predicted_L[layer] else None
        # Every step brings new predictions, unless the predictor has failed.
        self._is_predicted_L[layer] = False
        if mixed_E is not None and (shadow := self._shadows.get(layer)) is not None:
            self._hits += float(shadow.serve(list(tokens_per_expert), mixed_E[:, None])[0])
        uses_predictions = mixed_E is not None and self.trusts_predictor
        value_E = mixed_E if uses_predictions else self._counts.use_shares(layer)
        for matrix_LE in (self._value_LE, self._score_LE, self._idle_score_LE):
            matrix_LE[layer] = value_E
        first = self._layer_now < 0
        self._layer_now = layer
        num_choices = sum(tokens_per_expert.values())
        if first and num_choices > self._num_experts:
            self._is_long = True
            self._expect_balanced_routing(num_choices)

    def _mix_predictions(self, layer: int) -> NDArray:
        """Returns `[E]`: the last predictions, and a little of what the past hundred steps used."""
        slow_E, weight = self._counts.use_shares(layer, SLOW), self._slow_weight
        return (1.0 - weight) * self._predicted_LE[layer] + weight * slow_E

    def _expect_balanced_routing(self, num_choices: int) -> None:
        """Scores the layers ahead without a forecast, for `num_choices` choices in each."""
        probability = 1.0 - (1.0 - 1.0 / self._num_experts) ** num_choices
        for layer in range(self._layer_now + 1, len(self._score_LE)):
            if not self._is_forecast_L[layer]:
                self._score_LE[layer] = self._score_ahead(probability, layer)

    def may_evict_for(self, victim: Expert, newcomer: Expert) -> bool:
        return self.score(victim) < self.score(newcomer)

    def score(self, expert: Expert) -> float:
        """Returns the expert's score, in [0, 1]."""
        return float(self._score_LE[expert])

    def next_idle_candidate(self) -> Expert | None:
        if self._is_long:
            return None  # what a prefill's later layers need is requested soon enough
        candidates = [order.best_absent() for order in self._orders]
        score, expert = max(candidates, default=(NOT_IDLE, None))
        return expert if score > LEAST_IDLE_SCORE else None

    def end_step(self) -> None:
        self.trusts_predictor = self._counts.hits <= self._hits * (1.0 + MARGIN)
        self._counts.end_step()
        self._hits *= MEMORY


class ReuseOrder(ScoreOrder):
    """Lowest score first, and the best absent expert by the scores for idle time."""

    def __init__(self, score_LE: Scores, idle_LE: Scores, *, layers: range, num_experts: int):
        super().__init__(view_scores(score_LE, layers), layers=layers, num_experts=num_experts)
        self._idle_scores = view_scores(idle_LE, layers)

    def best_absent(self) -> tuple[float, Expert]:
        """Returns the highest idle score of an absent expert, NOT_IDLE if none is, and which."""
        return self.highest_absent(self._idle_scores(), least=NOT_IDLE)
