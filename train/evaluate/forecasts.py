"""Steps and forecasts that are recorded once and replayed for every system, machine and budget.

What a predictor answers depends on the steps alone, never on what a cache holds.

Shape suffixes: T tokens of the step, E experts, K top_k, L layers.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from collect.traces import Trace
from predictors.base import Floats, Forecast, Forecasts, Ints, Predictor, Signal
from predictors.metrics import name_distance
from predictors.spec import ModelSpec
from runtime.sim.step import ArrayStep, RecordedStep, batch_steps, replay_step
from train.errors import TrainError
from train.replay import first_tokens, is_decode

EventKey = tuple[Signal, int]
"""Signal and layer of an event; the layer of `TOKENS` is -1."""


class RecordedForecast(Forecast):
    """A forecast that computes its experts once and caches them."""

    @functools.cached_property
    def _ranked(self) -> dict[int, tuple[list[int], list[float]]]:
        return {}

    def experts(self, top_k: int) -> list[int]:
        """Return the experts to fetch, the most likely first."""
        return list(self.ranked(top_k)[0])

    def ranked(self, top_k: int) -> tuple[list[int], list[float]]:
        """Return the experts to fetch and their values of `order_E`, not to be written to."""
        if top_k not in self._ranked:
            experts, order_E = Forecast.experts(self, top_k), self.order_E
            self._ranked[top_k] = experts, [order_E.item(e) for e in experts]
        return self._ranked[top_k]


@dataclass(frozen=True)
class RecordedForecasts:
    """Every answer of one predictor to one sequence of steps."""

    kind: str
    signals: frozenset[Signal]
    steps: Sequence[dict[EventKey, list[RecordedForecast]]]
    stateless: bool = False
    """`Predictor.stateless` of the recorded predictor."""
    count_input_rows: Callable[[Ints], int] = len
    """`Predictor.count_input_rows` of the recorded predictor."""

    def at_distance(self, distance: str) -> "RecordedForecasts":
        """Return the answers at one distance only, as `name_distance` names it."""
        steps = [
            {
                event: [one for one in forecasts if name_distance(*event, one.layer) == distance]
                for event, forecasts in step.items()
            }
            for step in self.steps
        ]
        return replace(self, steps=steps)

    def predictor(self, spec: ModelSpec) -> "ReplayPredictor":
        """Return a predictor that gives these answers, beginning with the first step."""
        return ReplayPredictor(spec, self)


def record_forecasts(predictor: Predictor, steps: Iterable[RecordedStep]) -> RecordedForecasts:
    """Show a predictor the steps in order, as a replay does, and keep its answers."""
    recorded = [
        {
            (event.signal, event.layer): [copy_forecast(forecast) for forecast in event.forecasts]
            for event in replay_step(predictor, step, num_layers=predictor.spec.num_layers)
            if event.forecasts
        }
        for step in steps
    ]
    signals = predictor.signals - {Signal.LOGITS}
    return RecordedForecasts(
        predictor.kind, signals, recorded, predictor.stateless, predictor.count_input_rows
    )


def copy_forecast(forecast: Forecast) -> RecordedForecast:
    """Return a copy, since a predictor may answer with its own memory and overwrite it."""
    priority_E = forecast.priority_E
    return RecordedForecast(
        forecast.layer,
        np.array(forecast.scores_TE),
        None if forecast.wanted is None else list(forecast.wanted),
        None if priority_E is None else np.array(priority_E),
    )


class ReplayPredictor(Predictor):
    """Answers as the recorded predictor did, without looking at hidden states."""

    def __init__(self, spec: ModelSpec, recorded: RecordedForecasts):
        super().__init__(spec)
        self._recorded = recorded
        self._step = -1
        self._answers: Mapping[EventKey, Forecasts] = {}
        """Those of the step."""
        # On the instance, where the classes of predictors have them on the class.
        self.kind = recorded.kind  # type: ignore[misc]
        self.signals = recorded.signals  # type: ignore[misc]
        self.stateless = recorded.stateless  # type: ignore[misc]
        self.count_input_rows = recorded.count_input_rows  # type: ignore[assignment]

    def _answer(self, signal: Signal, layer: int) -> Forecasts:
        return self._answers.get((signal, layer), ())

    def begin_step(self, tokens_T: Ints, requests_T: Ints) -> Forecasts:  # noqa: ARG002
        self._step += 1
        self._answers = self._recorded.steps[self._step]
        return self._answer(Signal.TOKENS, -1)

    def layer_input(self, layer: int, hidden_TD: Floats) -> Forecasts:  # noqa: ARG002
        return self._answer(Signal.LAYER_INPUT, layer)

    def gate_input(self, layer: int, hidden_TD: Floats) -> Forecasts:  # noqa: ARG002
        return self._answer(Signal.GATE_INPUT, layer)

    def routed(self, layer: int, experts_TK: Ints, logits_TE: Floats | None) -> Forecasts:  # noqa: ARG002
        return self._answer(Signal.ROUTED, layer)


def routing_only(step: RecordedStep, num_layers: int) -> ArrayStep:
    """Return a step's routing, which is all that a replay with recorded forecasts reads."""
    experts_LTK = np.stack([step.experts(layer) for layer in range(num_layers)])
    return ArrayStep(step.tokens_T, step.requests_T, experts_LTK)


def held_out_steps(trace: Trace, *, batch: int, new_tokens: int) -> list[RecordedStep]:
    """Return steps of the held-out requests until `new_tokens` tokens are generated.

    `batch` requests decode together, with prefills between their decode steps.

    Raises:
        TrainError: no held-out request generated a token.
        MoecastError: fewer held-out requests than `batch`.
    """
    steps = list(first_tokens(batch_steps(trace.steps("held_out"), batch), new_tokens))
    if not any(is_decode(step) for step in steps):
        raise TrainError(
            f"the trace {trace.path} has no generated tokens in its held-out requests: collect one "
            "with more requests (data.num_prompts=...) and data.max_new_tokens=32"
        )
    return steps
