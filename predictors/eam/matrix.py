"""The expert activation matrix (EAM) and how far two of them are apart.

`EAM[l, e]` is how many tokens layer l routed to expert e: of a sequence (moe-infinity sequence
level, 4.2), or of an iteration or a request (request level, 4.1).

Shape suffixes: T tokens, K top_k, R requests, L layers, E experts, N matrices.
"""

import numpy as np
from numpy.typing import NDArray

from predictors.base import Floats, Ints


def count_rows(experts_TK: Ints, place_T: Ints, num_requests: int, num_experts: int) -> Floats:
    """`[R, E]`: one layer's row of each request; `place_T` tells whose each token is.

    The id E, a choice of none, is not counted.
    """
    if len(experts_TK) == 1:
        row_RE = np.zeros((1, num_experts + 1), np.float32)
        row_RE[0, experts_TK[0]] = 1.0
        return row_RE[:, :num_experts]
    width = num_experts + 1
    flat = (place_T[:, None] * width + experts_TK).ravel()
    counts = np.bincount(flat, minlength=num_requests * width)
    return counts.reshape(num_requests, width)[:, :num_experts].astype(np.float32)


def normalize_rows(rows_E: Floats) -> Floats:
    """Each row of the last axis at length 1; a row of zeros, a layer not seen yet, stays zeros."""
    length = np.sqrt(np.einsum("...e,...e->...", rows_E, rows_E))[..., None]
    return rows_E / np.maximum(length, 1e-12)


def eam_distance(one_LE: Floats, other_LE: Floats) -> float:
    """Equation 1 of moe-infinity sequence level, 4.2: `1 - mean over layers of the cosine of the
    rows`. A layer that either has not seen counts as cosine 0.
    """
    cosines_L = (normalize_rows(one_LE) * normalize_rows(other_LE)).sum(axis=1)
    return float(1.0 - cosines_L.mean())


def activation_ratios(counts_E: NDArray) -> Floats:
    """Activation ratios: each row divided by its sum; a row of zeros stays zeros."""
    total = counts_E.sum(axis=-1, keepdims=True)
    return (counts_E / np.maximum(total, 1e-12)).astype(np.float32)


def choice_probability(shares_E: Floats, top_k: int) -> Floats:
    """A token's chance of an expert: it makes `top_k` choices, and no expert twice."""
    return np.minimum(top_k * shares_E, 1.0)


def attainable_accuracy(counts_LE: Floats, top_k: int) -> NDArray[np.float64]:
    """Share of all choices that fell on the `top_k` busiest experts of their layer: the accuracy
    that a sequence's own EAM would have had. `[..., L, E]` to `[...]`.
    """
    busiest = np.sort(counts_LE, axis=-1)[..., -top_k:].sum(axis=(-2, -1), dtype=np.float64)
    return busiest / np.maximum(counts_LE.sum(axis=(-2, -1)), 1.0)


def layer_decays(num_layers: int) -> Floats:
    """`[L]`: `1 - (i - l) / L` for the layer i that is 1, 2, ... ahead of the current one: linear,
    at a rate inversely proportional to the number of layers (sequence level, 5.2 and algorithm 1,
    step 26; request level, 5.1).
    """
    return (1.0 - np.arange(1, num_layers + 1) / num_layers).astype(np.float32)
