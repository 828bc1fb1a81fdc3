"""Eviction by predicted reuse: forecasts of this step, then the use by the coming tokens.

Shape suffixes: L layers, E experts.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from predictors.base import Ints
from runtime.policy.eviction.base import (
    COMPILED,
    Expert,
    Probabilities,
    Scores,
    copy_scores,
)
from runtime.policy.eviction.regret import MEMORY, LayerGhost, RegretEviction

LEAST_IDLE_SCORE = 0.03
"""Share of the coming tokens that must use an expert for idle link time to be spent on it."""

SLOW = 0.98
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


class ReuseEviction(RegretEviction):
    """Evicts the expert with the lowest predicted use. Ours.

    The value of an expert is the share of the coming tokens that use it, as `predictors.reuse` last
    predicted, the next tokens counting most, mixed with a little of its share of the past ones.

    Experts of a layer that this step has yet to reach score `p + (1 - p) value`: `p` is the
    forecast that some token of the step needs the expert. Without a forecast, in a long step (whose
    tokens choose more often than a layer has experts), `p` is what balanced routing gives, so that
    a prefill keeps what its later layers are sure to need and evicts what its earlier ones have
    used. All other experts score their value, less where their layer is far ahead
    (`RegretEviction`). The scores are computed only when an expert is evicted or idle link time
    is spent: of what events say, mostly the last word is needed.

    Without a reuse predictor the value is the share of past steps that `UseShares` estimates, as it
    is where counting has hit more lately: ghost caches in a few layers run both on the same
    routing. Idle link time is then left idle: what counts could name, the cache already holds.
    """

    # Compiled methods with C types have no `super()`: they name the class.

    def __init__(self, *, num_layers: int, num_experts: int):
        super().__init__(num_layers=num_layers, num_experts=num_experts)
        self._ghosts = {layer: LayerGhost(num_experts, 1) for layer in self._counts.ghosts}
        self._hits = 0.0
        """Hits of the ghost caches under the predictions; decays as those of `_counts` do."""
        self._predicted_LE = np.zeros((num_layers, num_experts))
        """The last predictions."""
        self._predicted_view_LE = self._predicted_LE
        self._is_predicted = [False] * num_layers
        self._routed: Mapping[int, int] = {}
        """What the last routed layer's router has chosen."""
        self.idle_score_LE = np.zeros((num_layers, num_experts))
        """Scores for fetching in idle time, as `compute_idle_scores` left them: the value, or
        NOT_IDLE where a forecast of this step already decides what to fetch of the layer."""
        self._idle_view_LE = self.idle_score_LE
        self._probabilities: dict[int, NDArray[np.floating] | float] = {}
        """For each layer ahead, the probability that this step needs each expert, where known."""
        self._forecast_layers: set[int] = set()
        """Layers that a forecast of this step names and that it has not routed."""
        self._expected: set[int] = set()
        """Layers in `_probabilities` whose scores were needed."""
        self._expected_LE = np.zeros((num_layers, num_experts))
        """Scores of these layers."""
        self._is_long = False
        """The step's tokens choose more often in a layer than it has experts: a prefill."""
        self._slow_weight = 0.0
        self._uses_predictions = False
        """Whether predictions gave the last layer's value."""
        self.trusts_predictor = True
        """Whether the predictions decide, where there are any."""

    def divide(self, partitions: Sequence[tuple[int, range]]) -> None:
        super().divide(partitions)
        for layer, ghost in self._ghosts.items():
            ghost.num_slots = self._counts.ghosts[layer].num_slots
        self._slow_weight = 0.0
        for num_slots, _ in partitions:
            share = num_slots / self._size
            self._slow_weight = min(MAX_SLOW_WEIGHT, self._slow_weight + SLOW_WEIGHT * share)

    def begin_step(self, requests_T: Ints) -> None:
        RegretEviction.begin_step(self, requests_T)
        self._is_long = False
        self._probabilities.clear()
        self._expected.clear()
        self._forecast_layers.clear()
        self._is_outdated = True

    def on_forecast(self, layer: int, probability_E: Probabilities, order_E: Probabilities) -> None:  # noqa: ARG002
        if layer > self._layer_now:
            self._probabilities[layer] = np.asarray(probability_E)
            self._expected.discard(layer)
            self._forecast_layers.add(layer)
            self._is_outdated = True

    def on_reuse_scores(self, layer: int, score_1E: Probabilities) -> None:
        self._is_predicted[layer] = True
        self._predicted_LE[layer] = score_1E[0]
        if layer == self._layer_now:
            self._follow_routing(layer, self._routed)

    def on_routed(self, layer: int, tokens_per_expert: Mapping[int, int]) -> None:
        first = self._layer_now < 0
        self._routed = tokens_per_expert
        RegretEviction.on_routed(self, layer, tokens_per_expert)
        num_choices = sum(tokens_per_expert.values())
        if first and num_choices > self._num_experts:
            self._is_long = True
            self._expect_balanced_routing(num_choices)
        for routed in [ahead for ahead in self._probabilities if ahead <= layer]:
            del self._probabilities[routed]
            self._expected.discard(routed)
        self._forecast_layers.discard(layer)

    def _set_value(self, layer: int, tokens_per_expert: Mapping[int, int]) -> None:
        self._uses_predictions = self._is_predicted[layer] and self.trusts_predictor
        if self._is_predicted[layer]:
            # Every step brings new predictions, unless the predictor has failed.
            self._is_predicted[layer] = False
            mixed_E = self._mix_predictions(layer)
            ghost = self._ghosts.get(layer)
            if ghost is not None:
                self._hits += float(ghost.serve(list(tokens_per_expert), mixed_E[:, None])[0])
        if self._uses_predictions:
            copy_scores(mixed_E, self._value_LE[layer])
        else:
            RegretEviction._set_value(self, layer, tokens_per_expert)

    def _mix_predictions(self, layer: int) -> Scores:
        """Returns `[E]`: the last predictions, and a little of what the past hundred steps used."""
        mixed_E, weight = np.empty(self._num_experts), self._slow_weight
        view_E = mixed_E
        self._counts.write_decayed(layer, SLOW, view_E)
        if not COMPILED:
            return (1.0 - weight) * self._predicted_LE[layer] + weight * mixed_E
        for e in range(self._num_experts):
            view_E[e] = (1.0 - weight) * self._predicted_view_LE[layer, e] + weight * view_E[e]
        return mixed_E

    def _expect_balanced_routing(self, num_choices: int) -> None:
        """Scores the layers ahead without a forecast, for `num_choices` choices in each."""
        probability = 1.0 - (1.0 - 1.0 / self._num_experts) ** num_choices
        for layer in range(self._layer_now + 1, self._num_layers):
            self._probabilities.setdefault(layer, probability)

    def _expect(self, layer: int) -> None:
        """Computes `_expected_LE` of a layer that this step is known to reach."""
        if layer in self._expected:
            return
        self._expected.add(layer)
        probability = self._probabilities[layer]
        if COMPILED and not isinstance(probability, float) and probability.dtype == np.float32:
            self._expect_each(layer, probability)
            return
        probability_E = np.asarray(probability, np.float64)
        value_E = np.asarray(self._value_LE[layer])
        copy_scores(probability_E + (1.0 - probability_E) * value_E, self._expected_LE[layer])

    def _expect_each(self, layer: int, probability_E: NDArray[np.floating]) -> None:
        for e in range(self._num_experts):
            probability = float(probability_E[e])
            value = self._value_LE[layer, e]
            self._expected_LE[layer, e] = probability + (1.0 - probability) * value

    def scores(self) -> Scores:
        if not self._is_outdated:
            return self.score_N
        RegretEviction.scores(self)
        for layer in self._probabilities:
            self._expect(layer)
            copy_scores(self._expected_LE[layer], self._view_LE[layer])
        return self.score_N

    def compute_idle_scores(self) -> Scores:
        """Returns `idle_score_LE`, computed anew."""
        self._idle_view_LE[:, :] = self._value_LE
        for layer in self._forecast_layers:
            self._idle_view_LE[layer, :] = NOT_IDLE
        return self.idle_score_LE

    def may_evict_for(self, victim: Expert, newcomer: Expert) -> bool:
        # Without the discount: two experts used alike would take turns over an idle link.
        return self.score(victim) < self.score(newcomer)

    def score(self, expert: Expert) -> float:
        """Returns the expert's score before it is discounted by distance, in [0, 1]."""
        layer, e = expert
        if layer in self._probabilities:
            self._expect(layer)
            return float(self._expected_LE[layer, e])
        return float(self._value_LE[layer, e])

    def next_idle_candidate(self) -> Expert | None:
        # A prefill's later layers request soon enough what they need. What counts would name, the
        # cache already holds: fetching it cost 2 to 7 % of the time per output token.
        if self._is_long or not self._uses_predictions:
            return None
        return self.find_best_absent(self.compute_idle_scores(), LEAST_IDLE_SCORE)

    def end_step(self) -> None:
        self.trusts_predictor = self._counts.hits <= self._hits * (1.0 + MARGIN)
        RegretEviction.end_step(self)
        self._hits *= MEMORY
