"""Drops what is worth least: by forecasts of this step where it is still to come, and of the coming
tokens.

Shape suffixes: L layers, E experts, N = experts of a part's layers, layer by layer.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from runtime.policy.eviction.decayed_lfu import DECAYS, MEMORY, DecayedLfu, Shadow
from runtime.policy.eviction.protocol import Eviction, EvictionPolicy, Expert, Probabilities
from runtime.policy.eviction.scored import Scored, Scores, of_layers

LEAST = 0.03
"""Share of the coming tokens that must use an expert for idle link time to be spent on it."""

SLOW = DECAYS.index(0.98)
"""The counts that are mixed into what a forecaster says."""
SLOW_WEIGHT = 0.6
MOST_SLOW = 0.3
"""Their weight, for each share of all experts that the arena holds, and at most: forecasters look a
few tokens ahead, and a large arena keeps for tens. In replays .15 took 1 to 4 % from a token's time
at 25 and 50 % and added 2 % at 10 %."""

MARGIN = 0.02
"""Share by which counting must hit more: the best of several decays wins by chance otherwise."""

NOTHING = -1.0
"""Below every worth: not to be fetched in idle time."""


class Reuse(EvictionPolicy):
    """The value of an expert is the share of the coming tokens that use it, as `predictors.reuse`
    last said, the next tokens counting most, with a little of its share of the past ones.

    A layer that this step has still to reach is worth `p + (1 - p) value`: `p` is the forecast that
    some token of the step needs the expert. Where there is none and the step is long (it chooses
    more often than a layer has experts), `p` is what balanced routing gives, so that a prompt keeps
    what its later layers are sure to need and drops what its earlier ones have used. Elsewhere, an
    expert is worth its value.

    Without a forecaster the value is what `decayed-lfu` counts, and so it is where counting has hit
    more of late: shadow caches in a few layers serve both on the same routing.
    """

    def __init__(self, *, num_layers: int, num_experts: int):
        self._num_experts = num_experts
        self._counts = DecayedLfu(num_layers=num_layers, num_experts=num_experts)
        self._shadows = {layer: Shadow(num_experts, 1) for layer in self._counts.leaders}
        self._hits = 0.0
        """Of the shadows that keep by the forecaster; fades as those of `_counts` do."""
        self._said_LE = np.zeros((num_layers, num_experts))
        """The forecaster's last word."""
        self._was_said_L = np.zeros(num_layers, dtype=bool)
        self._value_LE = np.zeros((num_layers, num_experts))
        self._score_LE = np.zeros((num_layers, num_experts))
        self._idle_LE = np.zeros((num_layers, num_experts))
        """Worth of fetching in idle time: the value, or NOTHING where a forecast of this step has
        said what is wanted of the layer."""
        self._is_forecast_L = np.zeros(num_layers, dtype=bool)
        self._layer_now = -1
        """The last layer whose router has spoken in this step."""
        self._is_long = False
        """The step's tokens choose more often in a layer than it has experts: a prompt."""
        self._parts: list[ValueOrder] = []
        self._slow_weight = 0.0
        self.learned = True
        """Whether what the forecaster says is kept by, where it has said something."""

    def part(self, *, num_slots: int, layers: range) -> Eviction:
        self._counts.part(num_slots=num_slots, layers=layers)
        for layer, shadow in self._shadows.items():
            shadow.share = self._counts.share(layer)
        part = ValueOrder(
            self._score_LE, self._idle_LE, layers=layers, num_experts=self._num_experts
        )
        self._parts.append(part)
        share = num_slots / self._score_LE.size
        self._slow_weight = min(MOST_SLOW, self._slow_weight + SLOW_WEIGHT * share)
        return part

    def begin_step(self, new_request: bool) -> None:
        self._counts.begin_step(new_request)
        self._layer_now = -1
        self._is_long = False
        self._is_forecast_L[:] = False
        self._score_LE[:] = self._value_LE
        self._idle_LE[:] = self._value_LE

    def forecast(self, layer: int, probability_E: Probabilities) -> None:
        if layer > self._layer_now:
            self._is_forecast_L[layer] = True
            self._score_LE[layer] = self._coming(np.asarray(probability_E), layer)
            self._idle_LE[layer] = NOTHING

    def _coming(self, chance_E: NDArray | float, layer: int) -> NDArray:
        """`[E]`: worth of a layer that this step has still to reach."""
        return chance_E + (1.0 - chance_E) * self._value_LE[layer]

    def valued(self, layer: int, value_E: Probabilities) -> None:
        self._was_said_L[layer] = True
        self._said_LE[layer] = value_E

    def routed(self, layer: int, tokens_per_expert: Mapping[int, int]) -> None:
        self._counts.routed(layer, tokens_per_expert)
        said_E = self._said(layer) if self._was_said_L[layer] else None
        if said_E is not None and (shadow := self._shadows.get(layer)) is not None:
            self._hits += float(shadow.serve(list(tokens_per_expert), said_E[:, None])[0])
        is_kept_by = said_E is not None and self.learned
        value_E = said_E if is_kept_by else self._counts.shares(layer)
        for matrix_LE in (self._value_LE, self._score_LE, self._idle_LE):
            matrix_LE[layer] = value_E
        first = self._layer_now < 0
        self._layer_now = layer
        num_choices = sum(tokens_per_expert.values())
        if first and num_choices > self._num_experts:
            self._is_long = True
            self._expect(num_choices)

    def _said(self, layer: int) -> NDArray:
        """`[E]`: the forecaster's last word, and a little of what the past hundred steps used."""
        slow_E, weight = self._counts.shares(layer, SLOW), self._slow_weight
        return (1.0 - weight) * self._said_LE[layer] + weight * slow_E

    def _expect(self, num_choices: int) -> None:
        """The step's tokens choose so often in each layer: without a forecast, of all alike."""
        chance = 1.0 - (1.0 - 1.0 / self._num_experts) ** num_choices
        for layer in range(self._layer_now + 1, len(self._score_LE)):
            if not self._is_forecast_L[layer]:
                self._score_LE[layer] = self._coming(chance, layer)

    def makes_way(self, victim: Expert, newcomer: Expert) -> bool:
        """Only for what is worth more."""
        return self.worth(victim) < self.worth(newcomer)

    def worth(self, expert: Expert) -> float:
        """What the expert is kept by, in [0, 1]."""
        return float(self._score_LE[expert])

    def wish(self) -> Expert | None:
        if self._is_long:
            return None  # whatever a prompt's later layers need is asked for soon enough
        wishes = [part.wish() for part in self._parts]
        worth, expert = max(wishes, default=(NOTHING, None))
        return expert if worth > LEAST else None

    def end_step(self) -> None:
        self.learned = self._counts.hits <= self._hits * (1.0 + MARGIN)
        self._counts.end_step()
        self._hits *= MEMORY


class ValueOrder(Scored):
    """A part that can also say what it lacks most."""

    def __init__(self, score_LE: Scores, idle_LE: Scores, *, layers: range, num_experts: int):
        super().__init__(of_layers(score_LE, layers), layers=layers, num_experts=num_experts)
        self._idle = of_layers(idle_LE, layers)

    def wish(self) -> tuple[float, Expert]:
        """Worth of the best expert that is not resident, NOTHING where all are; and which."""
        worth_N = np.where(self._absent_N > 0.0, self._idle(), NOTHING)
        place = int(worth_N.argmax())
        return float(worth_N[place]), self._expert(place)
