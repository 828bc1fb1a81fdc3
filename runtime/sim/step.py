"""Recorded forward passes: the order of a model's events, and steps of several requests in one.

Shape suffixes: T tokens of the step, D hidden size, E experts, K top_k.
"""

import functools
import itertools
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Protocol

import numpy as np

from predictors.base import Floats, Forecasts, Ints, Predictor, Signal
from predictors.errors import MoecastError
from predictors.spec import ModelSpec
from runtime.policy.device_cache import count_tokens


class RecordedStep(Protocol):
    """One forward pass of a trace; only what a predictor needs is read."""

    @property
    def tokens_T(self) -> Ints: ...

    @property
    def requests_T(self) -> Ints: ...

    def layer_input(self, layer: int) -> Floats:
        """`[T, D]`."""
        ...

    def gate_input(self, layer: int) -> Floats:
        """`[T, D]`."""
        ...

    def logits(self, layer: int) -> Floats:
        """`[T, E]`."""
        ...

    def experts(self, layer: int) -> Ints:
        """`[T, K]`."""
        ...


EMPTY: Floats = np.empty((0, 0), np.float32)


class ArrayStep:
    """A step whose arrays are in memory: its routing, and the states that were recorded with it."""

    def __init__(
        self,
        tokens_T: Ints,
        requests_T: Ints,
        experts: Mapping[int, Ints] | Sequence[Ints] | Ints,
        states: Mapping[tuple[Signal, int], Floats] | None = None,
    ):
        """Keeps the arrays.

        Args:
            tokens_T: The tokens.
            requests_T: Request of each token.
            experts: `[T, K]` of each layer.
            states: Layer inputs, gate inputs and logits by layer. What is missing is an empty
                array: replays of recorded forecasts read none.
        """
        self.tokens_T = tokens_T
        self.requests_T = requests_T
        self.experts_LTK = experts
        self._states = {} if states is None else states

    def layer_input(self, layer: int) -> Floats:
        return self._states.get((Signal.LAYER_INPUT, layer), EMPTY)

    def gate_input(self, layer: int) -> Floats:
        return self._states.get((Signal.GATE_INPUT, layer), EMPTY)

    def logits(self, layer: int) -> Floats:
        return self._states.get((Signal.LOGITS, layer), EMPTY)

    def experts(self, layer: int) -> Ints:
        return self.experts_LTK[layer]


class StepEvent:
    """An event of a forward pass and the predictor's answer to it."""

    __slots__ = ("forecasts", "layer", "layer_now", "signal")

    def __init__(self, signal: Signal, layer: int, forecasts: Forecasts, layer_now: int) -> None:
        self.signal = signal
        """`TOKENS` when the step begins, then `LAYER_INPUT`, `GATE_INPUT`, `ROUTED` of each
        layer."""
        self.layer = layer
        """-1 for `TOKENS`."""
        self.forecasts = forecasts
        """Empty where the predictor does not listen to the event."""
        self.layer_now = layer_now
        """The first layer that a forecast can still be for; -1 before the first layer's input."""


def replay_step(
    predictor: Predictor | None, step: RecordedStep, *, num_layers: int
) -> Iterator[StepEvent]:
    """Shows a predictor one recorded step: every event, in the order in which a model produces it.

    The predictor sees an event when the iterator is advanced to it, and the step's end when the
    iterator is exhausted. Without a predictor the events are the same and nothing is forecast.
    """
    if predictor is None:
        yield from unanswered_events(num_layers)
        return
    signals, unanswered = predictor.signals, iter(unanswered_events(num_layers))
    sees_input, sees_gate = Signal.LAYER_INPUT in signals, Signal.GATE_INPUT in signals
    sees_routing, sees_logits = Signal.ROUTED in signals, Signal.LOGITS in signals
    forecasts = predictor.begin_step(step.tokens_T, step.requests_T)
    yield answer(next(unanswered), forecasts)
    for layer in range(num_layers):
        forecasts = predictor.layer_input(layer, step.layer_input(layer)) if sees_input else ()
        yield answer(next(unanswered), forecasts)
        forecasts = predictor.gate_input(layer, step.gate_input(layer)) if sees_gate else ()
        yield answer(next(unanswered), forecasts)
        if sees_routing:
            logits_TE = step.logits(layer) if sees_logits else None
            forecasts = predictor.routed(layer, step.experts(layer), logits_TE)
        else:
            forecasts = ()
        yield answer(next(unanswered), forecasts)
    predictor.end_step()


def answer(event: StepEvent, forecasts: Forecasts) -> StepEvent:
    """Returns the event with the predictor's answer to it."""
    if not forecasts:
        return event
    return StepEvent(event.signal, event.layer, forecasts, event.layer_now)


@functools.cache
def unanswered_events(num_layers: int) -> Sequence[StepEvent]:
    """Returns the events of every step without a predictor: making them anew takes longer."""
    events = [StepEvent(Signal.TOKENS, -1, (), -1)]
    for layer in range(num_layers):
        events += [
            StepEvent(Signal.LAYER_INPUT, layer, (), layer),
            StepEvent(Signal.GATE_INPUT, layer, (), layer + 1),  # after the layer's requests
            StepEvent(Signal.ROUTED, layer, (), layer + 1),
        ]
    return tuple(events)


class BatchedStep:
    """Steps of several requests that go through the model in one pass, rows concatenated."""

    def __init__(self, steps: Sequence[RecordedStep]):
        self._steps = tuple(steps)
        self.tokens_T: Ints = np.concatenate([step.tokens_T for step in steps])
        self.requests_T: Ints = np.concatenate([step.requests_T for step in steps])

    def layer_input(self, layer: int) -> Floats:
        return np.concatenate([step.layer_input(layer) for step in self._steps])

    def gate_input(self, layer: int) -> Floats:
        return np.concatenate([step.gate_input(layer) for step in self._steps])

    def logits(self, layer: int) -> Floats:
        return np.concatenate([step.logits(layer) for step in self._steps])

    def experts(self, layer: int) -> Ints:
        return np.concatenate([step.experts(layer) for step in self._steps])


def first_request(step: RecordedStep) -> int:
    return int(step.requests_T[0])


def batch_steps(steps: Iterable[RecordedStep], size: int) -> Iterator[RecordedStep]:
    """Combines steps as a server that decodes `size` requests at once would run them.

    Each request's prefill runs alone, then each decode step has one token of every running
    request. When a request ends, the next one is prefilled and takes its place. The batch is
    always full: decoding begins once there are `size` requests and stops when there are too few
    left to fill it, so the last tokens of the others are left out. Only the steps of `size`
    requests are held at a time.

    Args:
        steps: The steps of each request together, its prefill first.
        size: Requests that decode together.

    Raises:
        MoecastError: `size` is below 1, or fewer requests than `size` have generated tokens.
    """
    if size < 1:
        raise MoecastError(f"batch size {size}: must be at least 1")
    if size == 1:
        yield from steps
        return
    waiting = (deque(group) for _, group in itertools.groupby(steps, key=first_request))
    running: list[deque[RecordedStep]] = []
    is_full = False
    while True:
        running = [request for request in running if request]
        while len(running) < size:
            request = next(waiting, None)
            if request is None:
                if not is_full:
                    raise MoecastError(
                        f"batch size {size}: only {len(running)} requests generated tokens; take "
                        "a smaller batch, or more requests"
                    )
                return
            while request and len(request[0].tokens_T) > 1:
                yield request.popleft()
            if request:
                running.append(request)
        is_full = True
        yield BatchedStep([request.popleft() for request in running])


class RecordedRouting:
    """The experts that some token is routed to, ascending, for each step and layer.

    Takes two bytes for each expert and eight for each layer of a step: a million steps of twelve
    layers and four experts take 0.2 GB, where lists would take 2.
    """

    def __init__(self, steps: Iterable[RecordedStep], spec: ModelSpec):
        self._num_layers = spec.num_layers
        self._experts = array("h")
        self._starts = array("q", [0])
        for step in steps:
            for layer in range(spec.num_layers):
                self._experts.extend(count_tokens(step.experts(layer), spec.num_experts))
                self._starts.append(len(self._experts))

    def __iter__(self) -> Iterator[list[list[int]]]:
        for first in range(0, len(self._starts) - 1, self._num_layers):
            bounds = self._starts[first : first + self._num_layers + 1]
            yield [self._experts[start:end].tolist() for start, end in pairwise(bounds)]
