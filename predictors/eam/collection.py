"""The expert activation matrix collection (EAMC): a bounded number of matrices for lookup.

Shape suffixes: C capacity, L layers, E experts, R requests.
"""

import numpy as np

from predictors.base import Floats, Ints
from predictors.eam.matrix import activation_ratios, choice_probability, normalize_rows
from predictors.errors import PredictorError
from predictors.spec import ModelSpec


class EamCollection:
    """Matrices in `[0, size)` of preallocated arrays; a lookup is one matrix product per layer."""

    def __init__(self, capacity: int, num_layers: int, num_experts: int, *, top_k: int):
        self.capacity = capacity
        self.size = 0
        self.counts_CLE = np.zeros((capacity, num_layers, num_experts), np.float32)
        self.shares_CLE = np.zeros_like(self.counts_CLE)
        """Activation ratios."""
        self.chance_CLE = np.zeros_like(self.counts_CLE)
        """Probability that a token is routed to the expert."""
        self.units_LEC = np.zeros((num_layers, num_experts, capacity), np.float32)
        """Rows at length 1, matrices on the last axis: `row_RE @ units_LEC[l]` are the cosines of
        layer l (MoE-Infinity (sequence level), equation 1)."""
        self.flat_LEC = np.zeros_like(self.units_LEC)
        """Whole matrices at length 1 (MoE-Infinity (request level), section 4.2)."""
        self.prefix_LC = np.zeros((num_layers, capacity), np.float32)
        """Length of layers 0..l of `flat`."""
        self._top_k = top_k

    @classmethod
    def from_matrices(
        cls, counts_NLE: Floats, spec: ModelSpec, *, capacity: int, kind: str
    ) -> "EamCollection":
        """Makes a collection of these matrices; PredictorError if they exceed the capacity."""
        if capacity < 1 or len(counts_NLE) > capacity:
            raise PredictorError(
                f"{kind} with capacity={capacity} and {len(counts_NLE)} matrices: capacity must "
                "be at least 1 and not below their number"
            )
        collection = cls(capacity, spec.num_layers, spec.num_experts, top_k=spec.top_k)
        collection.fill(counts_NLE.astype(np.float32))
        return collection

    def put(self, position: int, counts_LE: Floats) -> None:
        """Writes a matrix to `position`, at most the first free one."""
        assert 0 <= position <= self.size
        assert position < self.capacity
        self.size = max(self.size, position + 1)
        self.counts_CLE[position] = counts_LE
        self.shares_CLE[position] = activation_ratios(counts_LE)
        self.chance_CLE[position] = choice_probability(self.shares_CLE[position], self._top_k)
        self.units_LEC[:, :, position] = normalize_rows(counts_LE)
        flat_LE = counts_LE / max(float(np.linalg.norm(counts_LE)), 1e-12)
        self.flat_LEC[:, :, position] = flat_LE
        self.prefix_LC[:, position] = np.sqrt(np.cumsum(np.square(flat_LE).sum(axis=1)))

    def fill(self, counts_NLE: Floats) -> None:
        """Replaces all matrices by these."""
        assert len(counts_NLE) <= self.capacity
        for array in (self.units_LEC, self.flat_LEC, self.prefix_LC):
            array[...] = 0.0
        self.size = 0
        for position, counts_LE in enumerate(counts_NLE):
            self.put(position, counts_LE)

    @property
    def counts(self) -> Floats:
        """The stored matrices, `[size, L, E]`."""
        return self.counts_CLE[: self.size]

    def most_similar(self, counts_LE: Floats) -> int:
        """Returns the position of the matrix with the largest cosine of the flattened matrices.

        MoE-Infinity (request level), section 4.2.
        """
        cosines_C = counts_LE.ravel() @ self.flat_LEC.reshape(counts_LE.size, -1)
        return int(cosines_C[: self.size].argmax())


def find_nearest(similarity_RC: Floats, count: int) -> Ints:
    """Returns `[R, count]`: the most similar matrices of each request, unordered."""
    if count >= similarity_RC.shape[1]:
        return np.broadcast_to(np.arange(similarity_RC.shape[1]), similarity_RC.shape)
    if count == 1:
        return similarity_RC.argmax(axis=1)[:, None]
    return np.argpartition(similarity_RC, -count, axis=1)[:, -count:]
