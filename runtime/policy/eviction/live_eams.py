"""Activation matrices (EAM) of the running requests, for eviction by what each has used.

Shape suffixes: T tokens of the step, K top_k, R requests of the step, S request slots, L layers,
E experts.
"""

import numpy as np
from numpy.typing import NDArray

from predictors.base import Ints
from predictors.eam.collection import count_rows
from predictors.requests import LiveRequests, StepRequests, grow_rows

EPSILON = 1e-6
"""Lets the layer decay order experts without uses (MoE-Infinity, sequence level, section 5.2); far
below the ratio of one token."""


def layer_decay(num_layers: int) -> NDArray[np.float64]:
    """Returns `[L]`: `1 - l / L`, linear, which favours experts nearer the first layer."""
    return 1.0 - np.arange(num_layers) / num_layers


class LiveEams:
    """One matrix of token counts for each running request.

    "For handling multiple sequences, we record separate EAMs" (MoE-Infinity, sequence level,
    section 1). A request that waits for the prompt of another keeps its matrix.
    """

    def __init__(self, *, num_layers: int, num_experts: int):
        self.counts_SLE = np.zeros((1, num_layers, num_experts))
        self.present = StepRequests(np.zeros(0, np.int64), np.zeros(0, np.int64), [])
        """The requests of this step."""
        self._requests = LiveRequests()

    @property
    def counts_RLE(self) -> NDArray[np.float64]:
        """The matrices of the step's requests."""
        return self.counts_SLE[self.present.slots_R]

    def begin_step(self, requests_T: Ints) -> None:
        """Begins a step; requests that were not running get an empty matrix."""
        self.present = self._requests.begin_step(requests_T)
        self.counts_SLE = grow_rows(self.counts_SLE, self._requests.num_slots)
        self.counts_SLE[self.present.new] = 0.0

    def count(self, experts_TK: Ints) -> NDArray[np.float32]:
        """Returns `[R, E]`: the tokens that each request routes to each expert of a layer."""
        present, num_experts = self.present, self.counts_SLE.shape[-1]
        return count_rows(experts_TK, present.request_T, present.num_requests, num_experts)

    def end_step(self) -> None:
        """Forgets the requests that have ended."""
        self._requests.release_ended()
