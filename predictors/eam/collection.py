"""Expert activation matrices (EAM), and a bounded collection of them for lookup (EAMC).

`EAM[l, e]` is the number of tokens that layer l routed to expert e: of a sequence (MoE-Infinity
(sequence level), section 4.2), or of an iteration or request ((request level), section 4.1).

Shape suffixes: T tokens, K top_k, R requests, C capacity, L layers, E experts, N matrices,
M clusters.
"""

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from predictors.base import Floats, Ints, Signal
from predictors.errors import PredictorError
from predictors.requests import LiveRequests, StepRequests
from predictors.spec import ModelSpec
from predictors.stored import Shapes, StoredPredictor

MAX_ROUNDS = 20
"""Iterations of Lloyd's algorithm; a few thousand matrices converge in about ten."""


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


class EamPredictor(StoredPredictor):
    """Base of the predictors that look up a collection.

    Args:
        counts_NLE: stored matrices, at most `capacity`; none is a cold start.
    """

    signals = frozenset({Signal.TOKENS, Signal.ROUTED})

    def __init__(
        self, spec: ModelSpec, counts_NLE: Floats, *, capacity: int, learning: bool, idle_steps: int
    ):
        super().__init__(spec)
        if capacity < 1 or len(counts_NLE) > capacity:
            raise PredictorError(
                f"{self.kind} with capacity={capacity} and {len(counts_NLE)} matrices: capacity "
                "must be at least 1 and not below their number"
            )
        self.capacity = capacity
        self.learning = learning
        self.idle_steps = idle_steps
        self.collection = EamCollection(
            capacity, spec.num_layers, spec.num_experts, top_k=spec.top_k
        )
        self.collection.fill(counts_NLE.astype(np.float32))
        self._requests = LiveRequests(idle_steps=idle_steps)
        self._present: StepRequests | None = None

    def arrays(self) -> dict[str, NDArray]:
        return {"matrices": self.collection.counts.astype(np.uint32)}

    @classmethod
    def shapes(cls, spec: ModelSpec) -> Shapes:
        return {"matrices": (None, spec.num_layers, spec.num_experts)}


def find_nearest(similarity_RC: Floats, count: int) -> Ints:
    """Returns `[R, count]`: the most similar matrices of each request, unordered."""
    if count >= similarity_RC.shape[1]:
        return np.broadcast_to(np.arange(similarity_RC.shape[1]), similarity_RC.shape)
    if count == 1:
        return similarity_RC.argmax(axis=1)[:, None]
    return np.argpartition(similarity_RC, -count, axis=1)[:, -count:]


def choose_representatives(matrices_NLE: Floats, num_clusters: int, random: Generator) -> Ints:
    """Returns the index of the member closest to each cluster's centroid, ascending.

    K-means by MoE-Infinity (sequence level), section 4.2 and equation 1, which is `1 - mean over
    layers of the cosine of the rows`. With every row at length 1, the squared distance of two
    flattened matrices is 2 L times that: the nearest centroid has the largest inner product, and a
    centroid is the mean with its rows scaled to length 1. If there are no more matrices than
    clusters, all are returned.
    """
    num_matrices, num_layers, num_experts = matrices_NLE.shape
    if num_matrices <= num_clusters:
        return np.arange(num_matrices)
    units_NV = normalize_rows(matrices_NLE).reshape(num_matrices, -1)
    centroids_MV = units_NV[_seed_centroids(units_NV, num_clusters, random)]
    cluster_N = np.full(num_matrices, -1)
    for _ in range(MAX_ROUNDS):
        nearest_N = (units_NV @ centroids_MV.T).argmax(axis=1)
        if np.array_equal(nearest_N, cluster_N):
            break
        cluster_N = nearest_N
        order = np.argsort(cluster_N, kind="stable")
        present, first = np.unique(cluster_N[order], return_index=True)
        sums = np.add.reduceat(units_NV[order], first, axis=0)
        means = normalize_rows(sums.reshape(-1, num_layers, num_experts))
        # An empty cluster keeps its centroid, and may get members again.
        centroids_MV[present] = means.reshape(len(present), -1)
    closeness_N = np.einsum("nv,nv->n", units_NV, centroids_MV[cluster_N])
    best_first = np.lexsort((-closeness_N, cluster_N))
    _, first = np.unique(cluster_N[best_first], return_index=True)
    return np.sort(best_first[first])


def _seed_centroids(units_NV: Floats, num_clusters: int, random: Generator) -> list[int]:
    """Draws initial centroids with probabilities in proportion to equation 1 (k-means++)."""
    chosen = [int(random.integers(len(units_NV)))]
    scale = float(units_NV[chosen[0]] @ units_NV[chosen[0]])
    nearest_N = units_NV @ units_NV[chosen[0]]
    while len(chosen) < num_clusters:
        far_N = np.maximum(scale - nearest_N, 0.0).astype(np.float64)
        far_N[chosen] = 0.0
        total = far_N.sum()
        if total <= 0:
            # Only duplicates are left: any of them serves.
            rest = np.setdiff1d(np.arange(len(units_NV)), chosen)
            chosen += rest[: num_clusters - len(chosen)].tolist()
            break
        chosen.append(int(random.choice(len(units_NV), p=far_N / total)))
        nearest_N = np.maximum(nearest_N, units_NV @ units_NV[chosen[-1]])
    return chosen


def count_rows(experts_TK: Ints, request_T: Ints, num_requests: int, num_experts: int) -> Floats:
    """Returns `[R, E]`, one layer's row of each request; `request_T` is each token's request.

    The id E, no choice, is not counted. One flat count is far faster than adding at pairs of
    indices.
    """
    if len(experts_TK) == num_requests == 1:
        row_RE = np.zeros((1, num_experts + 1), np.float32)
        row_RE[0, experts_TK[0]] = 1.0
        return row_RE[:, :num_experts]
    width = num_experts + 1
    flat = (request_T[:, None] * width + experts_TK).ravel()
    counts = np.bincount(flat, minlength=num_requests * width)
    return counts.reshape(num_requests, width)[:, :num_experts].astype(np.float32)


def normalize_rows(rows_E: Floats) -> Floats:
    """Scales each row of the last axis to length 1; a row of zeros, an unseen layer, stays zero."""
    length = np.sqrt(np.einsum("...e,...e->...", rows_E, rows_E))[..., None]
    return rows_E / np.maximum(length, 1e-12)


def activation_ratios(counts_E: NDArray) -> Floats:
    """Divides each row by its sum; a row of zeros stays zero."""
    total = counts_E.sum(axis=-1, keepdims=True)
    return (counts_E / np.maximum(total, 1e-12)).astype(np.float32)


def choice_probability(shares_E: Floats, top_k: int) -> Floats:
    """Returns the probability that a token chooses each expert, for `top_k` different choices."""
    return np.minimum(top_k * shares_E, 1.0)


def attainable_accuracy(counts_LE: Floats, top_k: int) -> NDArray[np.float64]:
    """Returns the share of choices that fell on the `top_k` most used experts of their layer.

    It is the accuracy of a sequence's own EAM as its forecast. `[..., L, E]` to `[...]`.
    """
    busiest = np.sort(counts_LE, axis=-1)[..., -top_k:].sum(axis=(-2, -1), dtype=np.float64)
    return busiest / np.maximum(counts_LE.sum(axis=(-2, -1)), 1.0)
