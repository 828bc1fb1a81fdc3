"""K-means of EAMs by MoE-Infinity (sequence level), section 4.2 and equation 1.

With every row at length 1, the squared distance of two flattened matrices is 2 L times equation 1:
the nearest centroid has the largest inner product, and a centroid is the mean with its rows scaled
to length 1.

Shape suffixes: N matrices, C clusters, L layers, E experts.
"""

import numpy as np
from numpy.random import Generator

from predictors.base import Floats, Ints
from predictors.eam.matrix import normalize_rows

MAX_ROUNDS = 20
"""Iterations of Lloyd's algorithm; a few thousand matrices converge in about ten."""


def choose_representatives(
    matrices_NLE: Floats, num_clusters: int, random: Generator, *, max_rounds: int = MAX_ROUNDS
) -> Ints:
    """Returns the index of the member closest to each cluster's centroid, ascending.

    If there are no more matrices than clusters, all are returned.
    """
    num_matrices, num_layers, num_experts = matrices_NLE.shape
    if num_matrices <= num_clusters:
        return np.arange(num_matrices)
    units_NV = normalize_rows(matrices_NLE).reshape(num_matrices, -1)
    centroids_CV = units_NV[_seed_centroids(units_NV, num_clusters, random)]
    cluster_N = np.full(num_matrices, -1)
    for _ in range(max_rounds):
        nearest_N = (units_NV @ centroids_CV.T).argmax(axis=1)
        if np.array_equal(nearest_N, cluster_N):
            break
        cluster_N = nearest_N
        order = np.argsort(cluster_N, kind="stable")
        present, first = np.unique(cluster_N[order], return_index=True)
        sums = np.add.reduceat(units_NV[order], first, axis=0)
        means = normalize_rows(sums.reshape(-1, num_layers, num_experts))
        # An empty cluster keeps its centroid, and may get members again.
        centroids_CV[present] = means.reshape(len(present), -1)
    closeness_N = np.einsum("nv,nv->n", units_NV, centroids_CV[cluster_N])
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
