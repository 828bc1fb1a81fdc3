"""The expert activation matrix collection (EAMC): a fixed number of matrices, laid out for lookup.

Shape suffixes: C capacity, L layers, E experts, R requests.
"""

import numpy as np

from predictors.base import Floats, Ints
from predictors.eam.matrix import activation_ratios, choice_probability, normalize_rows
from predictors.errors import PredictorError
from predictors.spec import ModelSpec


class EamCollection:
    """Matrices in `[0, size)` of preallocated arrays; a lookup is one matrix product a layer."""

    def __init__(self, capacity: int, num_layers: int, num_experts: int, *, top_k: int):
        self.capacity = capacity
        self.size = 0
        self.counts_CLE = np.zeros((capacity, num_layers, num_experts), np.float32)
        self.shares_CLE = np.zeros_like(self.counts_CLE)
        """Activation ratios."""
        self.chance_CLE = np.zeros_like(self.counts_CLE)
        """Of each token to be routed there."""
        self.units_LEC = np.zeros((num_layers, num_experts, capacity), np.float32)
        """Rows at length 1, the matrices last: `row_RE @ units_LEC[l]` is every cosine of layer l
        (sequence level, equation 1)."""
        self.flat_LEC = np.zeros_like(self.units_LEC)
        """Whole matrices at length 1 (request level 4.2)."""
        self.prefix_LC = np.zeros((num_layers, capacity), np.float32)
        """Length of layers 0..l of `flat`."""
        self._top_k = top_k

    @classmethod
    def of(
        cls, counts_NLE: Floats, spec: ModelSpec, *, capacity: int, kind: str
    ) -> "EamCollection":
        """One that holds these matrices; PredictorError, naming the `kind`, if it has no room."""
        if capacity < 1 or len(counts_NLE) > capacity:
            raise PredictorError(
                f"{kind} with capacity={capacity} and {len(counts_NLE)} matrices: the "
                "capacity must be at least 1 and hold them"
            )
        made = cls(capacity, spec.num_layers, spec.num_experts, top_k=spec.top_k)
        made.fill(counts_NLE.astype(np.float32))
        return made

    def put(self, place: int, counts_LE: Floats) -> None:
        """Writes one matrix; `place` may be the first free one."""
        assert 0 <= place <= self.size
        assert place < self.capacity
        self.size = max(self.size, place + 1)
        self.counts_CLE[place] = counts_LE
        self.shares_CLE[place] = activation_ratios(counts_LE)
        self.chance_CLE[place] = choice_probability(self.shares_CLE[place], self._top_k)
        self.units_LEC[:, :, place] = normalize_rows(counts_LE)
        flat_LE = counts_LE / max(float(np.linalg.norm(counts_LE)), 1e-12)
        self.flat_LEC[:, :, place] = flat_LE
        self.prefix_LC[:, place] = np.sqrt(np.cumsum(np.square(flat_LE).sum(axis=1)))

    def fill(self, counts_NLE: Floats) -> None:
        """Holds these matrices, and no others."""
        assert len(counts_NLE) <= self.capacity
        for array in (self.units_LEC, self.flat_LEC, self.prefix_LC):
            array[...] = 0.0
        self.size = 0
        for place, counts_LE in enumerate(counts_NLE):
            self.put(place, counts_LE)

    @property
    def counts(self) -> Floats:
        """`[size, L, E]`: what it holds."""
        return self.counts_CLE[: self.size]

    def most_similar(self, counts_LE: Floats) -> int:
        """The matrix at the smallest cosine distance, both flattened (request level 4.2)."""
        cosines_C = counts_LE.ravel() @ self.flat_LEC.reshape(counts_LE.size, -1)
        return int(cosines_C[: self.size].argmax())


def find_nearest(similarity_RC: Floats, count: int) -> Ints:
    """`[R, count]`: the most similar matrices of each request, in no order."""
    if count >= similarity_RC.shape[1]:
        return np.broadcast_to(np.arange(similarity_RC.shape[1]), similarity_RC.shape)
    if count == 1:
        return similarity_RC.argmax(axis=1)[:, None]
    return np.argpartition(similarity_RC, -count, axis=1)[:, -count:]
