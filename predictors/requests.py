"""Which requests are alive, for predictors that remember them: ids to rows of their own arrays.

Shape suffixes: T tokens of the step, R requests of the step, E experts.
"""

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from predictors.base import Floats, Ints

IDLE_STEPS = 16
"""Steps without a token of a request after which it counts as ended: nobody says when one ends,
and one that waits for the prompts of others misses a few steps only."""


@dataclass(frozen=True)
class StepRequests:
    """The requests of one step."""

    slots_R: Ints
    """Row of each request, in the arrays of whoever remembers."""
    place_T: Ints
    """Each token's request, as an index into `slots_R`."""
    new: list[int]
    """Slots of the requests that were not alive before."""

    @property
    def rows(self) -> slice | Ints:
        """What to index arrays of all slots with: of a single request a slice, which is faster."""
        if len(self.slots_R) > 1:
            return self.slots_R
        slot = int(self.slots_R[0])
        return slice(slot, slot + 1)

    @property
    def num_requests(self) -> int:
        return len(self.slots_R)


class LiveRequests:
    """Gives each live request a slot, smallest free one first; an id not alive is a new request.

    Bounded: no more are alive than came within the last `idle_steps` steps.
    """

    def __init__(self, *, idle_steps: int = IDLE_STEPS):
        self.num_slots = 0
        """Slots that were ever in use: what arrays must have rows for."""
        self._idle_steps = idle_steps
        self._step = 0
        self._live: OrderedDict[int, tuple[int, int]] = OrderedDict()
        """Request id to (slot, last step), the longest unseen first."""
        self._free: list[int] = []

    def begin_step(self, requests_T: Ints) -> StepRequests:
        """The requests that the step's tokens belong to."""
        self._step += 1
        if len(requests_T) == 1 or (requests_T == requests_T[0]).all():
            ids, place_T = requests_T[:1].tolist(), np.zeros(len(requests_T), np.int64)
        else:
            unique, place_T = np.unique(requests_T, return_inverse=True)
            ids = unique.tolist()
        slots, new = [], []
        for request in ids:
            if request in self._live:
                slot = self._live[request][0]
            else:
                slot = self._new_slot()
                new.append(slot)
            self._live[request] = (slot, self._step)
            self._live.move_to_end(request)
            slots.append(slot)
        return StepRequests(np.array(slots, np.int64), place_T, new)

    def ended(self) -> list[int]:
        """Slots of the requests that have ended since; they are free from now on."""
        slots = []
        while self._live:
            request, (slot, seen) = next(iter(self._live.items()))
            if self._step - seen < self._idle_steps:
                break
            del self._live[request]
            slots.append(slot)
        self._free += slots
        return slots

    def _new_slot(self) -> int:
        if self._free:
            return self._free.pop()
        self.num_slots += 1
        return self.num_slots - 1


def expand_to_tokens(scores_RE: Floats, present: StepRequests) -> Floats:
    """`[T, E]`: each token's request's row; of a single request a view, not copies."""
    num_tokens = len(present.place_T)
    if len(scores_RE) > 1:
        return scores_RE[present.place_T]
    if num_tokens == 1:
        return scores_RE
    return np.broadcast_to(scores_RE, (num_tokens, scores_RE.shape[1]))


def grow_rows(array: np.ndarray, num_rows: int) -> np.ndarray:
    """The array with at least `num_rows` rows, new ones zero; doubled, so that it is rare."""
    if len(array) >= num_rows:
        return array
    larger = np.zeros((max(num_rows, 2 * len(array)), *array.shape[1:]), array.dtype)
    larger[: len(array)] = array
    return larger
