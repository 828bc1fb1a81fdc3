"""The steps that every system replays, and their routing in memory.

Shape suffixes: T tokens of the step, K top_k, L layers, D hidden size, E experts.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from collect.traces import Trace
from predictors.base import Floats, Ints
from runtime.sim.step import RecordedStep, batch_steps
from train.errors import TrainError

NOTHING: Floats = np.empty((0, 0), np.float32)


@dataclass(frozen=True)
class Routed:
    """A step's routing alone: all that a replay with recorded forecasts looks at."""

    tokens_T: Ints
    requests_T: Ints
    experts_LTK: Ints

    def experts(self, layer: int) -> Ints:
        return self.experts_LTK[layer]

    def layer_input(self, layer: int) -> Floats:  # noqa: ARG002
        return NOTHING

    def gate_input(self, layer: int) -> Floats:  # noqa: ARG002
        return NOTHING

    def logits(self, layer: int) -> Floats:  # noqa: ARG002
        return NOTHING


def routed(step: RecordedStep, num_layers: int) -> Routed:
    """The step without its hidden states."""
    experts_LTK = np.stack([step.experts(layer) for layer in range(num_layers)])
    return Routed(step.tokens_T, step.requests_T, experts_LTK)


def is_decode(step: RecordedStep) -> bool:
    """One token of each of its requests."""
    return len(step.tokens_T) == len(set(step.requests_T.tolist()))


def held_out_steps(trace: Trace, *, batch: int, new_tokens: int) -> list[RecordedStep]:
    """The held-out requests as `batch` of them decode together, until `new_tokens` tokens are
    generated; prefills between them.

    Raises:
        TrainError: no held-out request generated a token.
        MoecastError: fewer held-out requests than `batch`.
    """
    steps = list(first(batch_steps(trace.steps("held_out"), batch), new_tokens))
    if not any(is_decode(step) for step in steps):
        raise TrainError(
            f"the trace {trace.path} has no generated tokens in its held-out requests: collect one "
            "with more requests (data.num_prompts=...) and data.new_tokens=32"
        )
    return steps


def first(steps: Iterable[RecordedStep], new_tokens: int) -> Iterator[RecordedStep]:
    """Steps until so many tokens were generated."""
    seen = 0
    for step in steps:
        yield step
        seen += len(step.tokens_T) if is_decode(step) else 0
        if seen >= new_tokens:
            return
