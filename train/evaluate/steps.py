"""The steps that every system replays, and their routing in memory.

Shape suffixes: T tokens of the step, K top_k, L layers.
"""

from dataclasses import dataclass

import numpy as np

from collect.traces import Trace
from predictors.base import Floats, Ints
from runtime.sim.step import RecordedStep, batch_steps
from train.errors import TrainError
from train.replay import first_tokens, is_decode

EMPTY: Floats = np.empty((0, 0), np.float32)


@dataclass(frozen=True)
class RoutedStep:
    """A step's routing alone, which is all that a replay with recorded forecasts reads."""

    tokens_T: Ints
    requests_T: Ints
    experts_LTK: Ints

    def experts(self, layer: int) -> Ints:
        """`[T, K]`."""
        return self.experts_LTK[layer]

    def layer_input(self, layer: int) -> Floats:  # noqa: ARG002
        """Return nothing: recorded forecasts need no hidden states."""
        return EMPTY

    gate_input = logits = layer_input


def routing_only(step: RecordedStep, num_layers: int) -> RoutedStep:
    """Return the step without its hidden states."""
    experts_LTK = np.stack([step.experts(layer) for layer in range(num_layers)])
    return RoutedStep(step.tokens_T, step.requests_T, experts_LTK)


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
            "with more requests (data.num_prompts=...) and data.new_tokens=32"
        )
    return steps
