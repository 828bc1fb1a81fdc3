"""Forecasts recorded once and played back in every replay of the same steps.

What a predictor answers depends on the steps alone, never on what a cache holds, so that one
recording serves every system, machine and budget.

Shape suffixes: T tokens of the step, E experts, K top_k.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from predictors.base import Floats, Forecast, Forecasts, Ints, Predictor, Signal
from predictors.spec import ModelSpec
from runtime.sim.step import RecordedStep

Event = tuple[str, int]
"""(name of the predictor's method, layer); the layer of `begin_step` is -1."""

EVENTS = {
    "layer_input": Signal.LAYER_INPUT,
    "gate_input": Signal.GATE_INPUT,
    "routed": Signal.ROUTED,
}
"""A layer's events in the order in which a model produces them, and who is sent them."""


@dataclass(frozen=True)
class Told(Forecast):
    """A forecast that has been given: what is asked of it again and again is worked out once."""

    _experts: dict[int, list[int]] = field(default_factory=dict, repr=False, compare=False)

    def experts(self, top_k: int) -> list[int]:
        if top_k not in self._experts:
            self._experts[top_k] = super().experts(top_k)
        return list(self._experts[top_k])


def told(forecast: Forecast) -> Told:
    """A copy: what a predictor answers with may be its own memory, and change."""
    priority_E = forecast.priority_E
    return Told(
        forecast.layer,
        np.array(forecast.scores_TE),
        None if forecast.wanted is None else list(forecast.wanted),
        None if priority_E is None else np.array(priority_E),
    )


@dataclass(frozen=True)
class Tape:
    """Every answer of one predictor to one sequence of steps."""

    kind: str
    signals: frozenset[Signal]
    steps: Sequence[dict[Event, list[Told]]]

    def playback(self, spec: ModelSpec) -> "Playback":
        """A predictor at the beginning of the tape; any number may share one."""
        return Playback(spec, self)

    def at_distance(self, distance: int) -> "Tape":
        """Only what was forecast so many layers ahead; 0: for the layer whose event it answers."""
        kept = [
            {
                event: near
                for event, forecasts in step.items()
                if (near := [one for one in forecasts if one.layer - event[1] == distance])
            }
            for step in self.steps
        ]
        return Tape(self.kind, self.signals, kept)


def record(predictor: Predictor, steps: Iterable[RecordedStep]) -> Tape:
    """Shows a predictor the steps in order, as a replay does, and keeps what it answers."""
    signals = predictor.signals
    answers: list[dict[Event, list[Told]]] = []
    for step in steps:
        given: dict[Event, list[Told]] = {}

        def keep(event: Event, forecasts: Forecasts, given: dict = given) -> None:
            if forecasts:
                given[event] = [told(one) for one in forecasts]

        keep(("begin_step", -1), predictor.begin_step(step.tokens_T, step.requests_T))
        for layer in range(predictor.spec.num_layers):
            if Signal.LAYER_INPUT in signals:
                forecasts = predictor.layer_input(layer, step.layer_input(layer))
                keep(("layer_input", layer), forecasts)
            if Signal.GATE_INPUT in signals:
                keep(("gate_input", layer), predictor.gate_input(layer, step.gate_input(layer)))
            if Signal.ROUTED in signals:
                logits_TE = step.logits(layer) if Signal.LOGITS in signals else None
                forecasts = predictor.routed(layer, step.experts(layer), logits_TE)
                keep(("routed", layer), forecasts)
        predictor.end_step()
        answers.append(given)
    return Tape(predictor.kind, signals - {Signal.LOGITS}, answers)


def foretold(steps: Iterable[RecordedStep], spec: ModelSpec) -> Tape:
    """A predictor that knows: at the beginning of a step, and at each layer's gate, it forecasts
    all later layers exactly as they will be routed.
    """
    answers: list[dict[Event, list[Told]]] = []
    for step in steps:
        exact = [exactly(step.experts(layer), layer, spec) for layer in range(spec.num_layers)]
        given: dict[Event, list[Told]] = {("begin_step", -1): exact}
        for now in range(spec.num_layers - 1):
            given["gate_input", now] = exact[now + 1 :]
        answers.append(given)
    return Tape("truth", frozenset({Signal.TOKENS, Signal.GATE_INPUT}), answers)


def exactly(experts_TK: Ints, layer: int, spec: ModelSpec) -> Told:
    """The routing of one layer as a forecast; the id `num_experts` stands for a choice of none."""
    # One column more, for choices of none.
    scores_TE = np.zeros((len(experts_TK), spec.num_experts + 1), np.float32)
    np.put_along_axis(scores_TE, experts_TK, 1.0, axis=1)
    return Told(layer, scores_TE[:, :-1])


class Playback(Predictor):
    """Answers as the recorded predictor did; hidden states are not looked at."""

    def __init__(self, spec: ModelSpec, tape: Tape):
        super().__init__(spec)
        self._tape = tape
        self._step = -1
        # On the instance, where the classes of predictors have them on the class.
        self.kind = tape.kind  # type: ignore[misc]
        self.signals = tape.signals  # type: ignore[misc]

    def _answer(self, event: Event) -> Forecasts:
        return self._tape.steps[self._step].get(event, ())

    def begin_step(self, tokens_T: Ints, requests_T: Ints) -> Forecasts:  # noqa: ARG002
        self._step += 1
        return self._answer(("begin_step", -1))

    def layer_input(self, layer: int, hidden_TD: Floats) -> Forecasts:  # noqa: ARG002
        return self._answer(("layer_input", layer))

    def gate_input(self, layer: int, hidden_TD: Floats) -> Forecasts:  # noqa: ARG002
        return self._answer(("gate_input", layer))

    def routed(self, layer: int, experts_TK: Ints, logits_TE: Floats | None) -> Forecasts:  # noqa: ARG002
        return self._answer(("routed", layer))
