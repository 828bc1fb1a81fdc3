"""Running requests, for predictors and policies with state per request: maps ids to array rows.

Shape suffixes: T tokens of the step, R requests of the step, E experts.
"""

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from predictors.base import Floats, Ints

IDLE_STEPS = 16
"""Steps without a token after which a request counts as ended: its end is not signalled, and one
that waits for the prompts of others misses a few steps only."""


@dataclass(frozen=True)
class StepRequests:
    slots_R: Ints
    """Row of each request in the predictor's arrays."""
    request_T: Ints
    """Index of each token's request in `slots_R`."""
    new: list[int]
    """Slots of the requests that begin in this step."""

    @property
    def rows(self) -> slice | Ints:
        """Index of the requests' rows: a slice for a single request, which is faster."""
        if len(self.slots_R) > 1:
            return self.slots_R
        slot = int(self.slots_R[0])
        return slice(slot, slot + 1)

    @property
    def num_requests(self) -> int:
        return len(self.slots_R)


class LiveRequests:
    """Assigns slots to running requests; an id that is not running begins a new request.

    The number of slots is bounded by the requests of the last `idle_steps` steps.
    """

    def __init__(self, *, idle_steps: int = IDLE_STEPS):
        self.num_slots = 0
        """Number of slots used so far: the rows that arrays must have."""
        self._idle_steps = idle_steps
        self._step = 0
        self._live: OrderedDict[int, tuple[int, int]] = OrderedDict()
        """Request id to (slot, last step), the least recent first."""
        self._free: list[int] = []

    def begin_step(self, requests_T: Ints) -> StepRequests:
        self._step += 1
        if len(requests_T) == 1 or (requests_T == requests_T[0]).all():
            ids, request_T = requests_T[:1].tolist(), np.zeros(len(requests_T), np.int64)
        else:
            unique, request_T = np.unique(requests_T, return_inverse=True)
            ids = unique.tolist()
        slots, new = [], []
        for request in ids:
            if request in self._live:
                slot = self._live[request][0]
            else:
                if not self._free:
                    self._free.append(self.num_slots)
                    self.num_slots += 1
                slot = self._free.pop()
                new.append(slot)
            self._live[request] = (slot, self._step)
            self._live.move_to_end(request)
            slots.append(slot)
        return StepRequests(np.array(slots, np.int64), request_T, new)

    def release_ended(self) -> list[int]:
        """Frees and returns the slots of the requests that have ended."""
        slots = []
        while self._live:
            request, (slot, seen) = next(iter(self._live.items()))
            if self._step - seen < self._idle_steps:
                break
            del self._live[request]
            slots.append(slot)
        self._free += slots
        return slots


def expand_to_tokens(scores_RE: Floats, present: StepRequests) -> Floats:
    """Returns `[T, E]`, the row of each token's request; a view for a single request."""
    num_tokens = len(present.request_T)
    if len(scores_RE) > 1:
        return scores_RE[present.request_T]
    if num_tokens == 1:
        return scores_RE
    return np.broadcast_to(scores_RE, (num_tokens, scores_RE.shape[1]))


def grow_rows(array: np.ndarray, num_rows: int) -> np.ndarray:
    """Returns the array with at least `num_rows` rows, new ones zero; it grows by doubling."""
    if len(array) >= num_rows:
        return array
    larger = np.zeros((max(num_rows, 2 * len(array)), *array.shape[1:]), array.dtype)
    larger[: len(array)] = array
    return larger
