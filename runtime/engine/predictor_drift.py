"""Compares the accuracy of a predictor that serves with the accuracy on its entry's card."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from predictors.base import Forecast, Forecasts, Ints
from predictors.metrics import (
    CardAccuracy,
    MeanAccumulator,
    match_chosen_TK,
    name_distance,
    sum_means,
)

log = logging.getLogger(__name__)

SAMPLE_STEPS = 8
"""One decode step in as many is compared: to rank the scores of every step would take a noticeable
part of a small model's time."""
WINDOW_TOKENS = 500
"""Compared tokens from one judgement to the next. Their mean varies by about a hundredth."""
MAX_DROP = 0.05
"""Drop of the mean accuracy from which an entry no longer fits."""
CLEARED_DROP = 0.025
"""Drop up to which it fits again: less than `MAX_DROP`, so that no line repeats at the edge."""


class SampledStep:
    """Forecasts and routing of one decode step."""

    def __init__(self) -> None:
        self._forecasts: dict[int, tuple[str, Forecast]] = {}
        """Distance and last forecast of each layer."""
        self._routing: dict[int, Ints] = {}

    def add_routing(self, layer: int, experts_TK: Ints) -> None:
        self._routing[layer] = experts_TK.copy()

    def add_forecasts(
        self, forecasts: Forecasts, *, signal: str, layer: int, layer_now: int
    ) -> None:
        """Adds the forecasts of one event; a layer's later ones replace earlier ones.

        Args:
            signal: Name of the event.
            layer: Layer of the event; negative at the beginning of the step.
            layer_now: First layer that has not been routed when the event happens.
        """
        for forecast in forecasts:
            if forecast.layer >= layer_now:
                # A copy: the array may be the predictor's own memory, and change.
                kept = Forecast(forecast.layer, forecast.scores_TE.copy())
                self._forecasts[forecast.layer] = name_distance(signal, layer, forecast.layer), kept

    def pairs(self) -> Iterator[tuple[str, Forecast, Ints]]:
        """Yields distance, forecast and routing of each layer that has both for all tokens."""
        for layer, (distance, forecast) in self._forecasts.items():
            experts_TK = self._routing.get(layer)
            # A sequence that has left during the step has forecasts without a routing.
            if experts_TK is not None and len(experts_TK) == len(forecast.scores_TE):
                yield distance, forecast, experts_TK


@dataclass(frozen=True, kw_only=True)
class DriftReport:
    """Accuracies in the last window; layers without a comparison have None."""

    entry: str
    """Name of the entry."""
    num_tokens: int
    """Compared tokens; 0 until the first judgement."""
    accuracy: tuple[float | None, ...]
    """The accuracy of each layer while serving."""
    card_accuracy: tuple[float | None, ...]
    """The accuracy of each layer on the entry's card, at the distances at which it was forecast
    here."""
    mean_drop: float | None
    """Mean of the card's accuracies less that of the served ones; None until the first
    judgement."""
    has_drifted: bool
    """Whether the entry no longer fits what is served."""


class DriftMonitor:
    """Judges a predictor each time that `WINDOW_TOKENS` tokens were compared with its card.

    One line of the log says when the entry no longer fits.

    Args:
        card: Accuracy on the card of the entry.
        top_k: Experts that the model chooses for each token.
        score_command: Command that scores the entry on a file of prompts.
        train_command: Command that trains another entry for the model.
    """

    def __init__(self, card: CardAccuracy, *, top_k: int, score_command: str, train_command: str):
        self._card, self._top_k = card, top_k
        self._commands = score_command, train_command
        self._num_in_row = 0
        """Decode steps since the last sampled one, all of which the predictor got."""
        self._begin_window()
        nothing = (None,) * len(card.decode)
        self.report = DriftReport(
            entry=card.entry,
            num_tokens=0,
            accuracy=nothing,
            card_accuracy=nothing,
            mean_drop=None,
            has_drifted=False,
        )
        """Replaced as a whole, so that any thread may read it."""

    def _begin_window(self) -> None:
        self._num_tokens = 0
        self._live = [MeanAccumulator() for _ in self._card.decode]
        self._expected = [MeanAccumulator() for _ in self._card.decode]

    def begin_step(self, *, is_decode: bool, is_fed: bool) -> SampledStep | None:
        """Returns the step, if it is sampled.

        Only decode steps are, and after steps that the predictor got: what it has missed, it may
        lack for a few tokens.
        """
        self._num_in_row = self._num_in_row + is_decode if is_fed else 0
        if not is_decode or self._num_in_row < SAMPLE_STEPS:
            return None
        self._num_in_row = 0
        return SampledStep()

    def add(self, step: SampledStep) -> None:
        """Compares a step's forecasts with its routing; judges if the window is complete."""
        num_tokens = 0
        for distance, forecast, experts_TK in step.pairs():
            expected = self._card.expect(forecast.layer, distance)
            if expected is None:
                continue
            hit_TK = match_chosen_TK(forecast.chosen_TK(self._top_k), experts_TK)
            # The id E is no choice.
            num_made = int((experts_TK < forecast.scores_TE.shape[1]).sum())
            self._live[forecast.layer].add(int(hit_TK.sum()), num_made)
            self._expected[forecast.layer].add(expected * num_made, num_made)
            num_tokens = len(experts_TK)
        self._num_tokens += num_tokens
        if self._num_tokens >= WINDOW_TOKENS:
            self._judge()
            self._begin_window()

    def _judge(self) -> None:
        live, expected = sum_means(self._live).value, sum_means(self._expected).value
        assert live is not None
        assert expected is not None
        before, drop = self.report.has_drifted, expected - live
        self.report = DriftReport(
            entry=self._card.entry,
            num_tokens=self._num_tokens,
            accuracy=tuple(mean.value for mean in self._live),
            card_accuracy=tuple(mean.value for mean in self._expected),
            mean_drop=drop,
            has_drifted=drop > CLEARED_DROP if before else drop >= MAX_DROP,
        )
        if self.report.has_drifted and not before:
            log.warning(
                "the predictor %s no longer fits what is served: its accuracy over the last %d "
                "sampled tokens is %.3f, its card has %.3f. Answers stay the same, but more "
                "experts come late. To see all metrics on prompts like these: %s. To train an "
                "entry on them: %s",
                self._card.entry,
                self._num_tokens,
                live,
                expected,
                *self._commands,
            )
