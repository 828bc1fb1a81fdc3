"""What a replay is shown of one forward pass, and how passes of several requests become one.

Shape suffixes: T tokens of the step, D hidden size, E experts, K top_k.
"""

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np

from predictors.base import Floats, Ints
from predictors.errors import MoecastError


class Step(Protocol):
    """What a trace keeps of one forward pass."""

    @property
    def tokens_T(self) -> Ints: ...

    @property
    def requests_T(self) -> Ints: ...

    def layer_input(self, layer: int) -> Floats: ...

    def gate_input(self, layer: int) -> Floats: ...

    def logits(self, layer: int) -> Floats: ...

    def experts(self, layer: int) -> Ints: ...


class Together:
    """Steps of several requests that go through the model in one pass, row below row."""

    def __init__(self, steps: Sequence[Step]):
        self._steps = tuple(steps)
        self.tokens_T: Ints = np.concatenate([step.tokens_T for step in steps])
        self.requests_T: Ints = np.concatenate([step.requests_T for step in steps])

    def layer_input(self, layer: int) -> Floats:
        """`[T, D]`."""
        return np.concatenate([step.layer_input(layer) for step in self._steps])

    def gate_input(self, layer: int) -> Floats:
        """`[T, D]`."""
        return np.concatenate([step.gate_input(layer) for step in self._steps])

    def logits(self, layer: int) -> Floats:
        """`[T, E]`."""
        return np.concatenate([step.logits(layer) for step in self._steps])

    def experts(self, layer: int) -> Ints:
        """`[T, K]`."""
        return np.concatenate([step.experts(layer) for step in self._steps])


def first_request(step: Step) -> int:
    """The request of a step's first token."""
    return int(step.requests_T[0])


def batched(steps: Iterable[Step], size: int) -> Iterator[Step]:
    """The steps as a server would run them that decodes `size` requests at once: each request's
    prefill by itself, then one token of each request in one step. When a request ends, the next
    one's prefill comes and it takes the place.

    The batch is always full: it begins when there are `size` requests and ends when there are no
    more to fill it, and what the others still have is left out. Of the trace, no more is held than
    the steps of `size` requests.

    Args:
        steps: those of a request together, its prefill first.

    Raises:
        MoecastError: fewer requests with generated tokens than `size`, or `size` below 1.
    """
    if size < 1:
        raise MoecastError(f"batch size {size}: must be at least 1")
    if size == 1:
        yield from steps
        return
    waiting = (deque(group) for _, group in itertools.groupby(steps, key=first_request))
    running: list[deque[Step]] = []
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
        yield Together([request.popleft() for request in running])
