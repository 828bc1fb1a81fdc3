"""The expert activation matrix (EAM), and the distance of two.

`EAM[l, e]` is the number of tokens that layer l routed to expert e: of a sequence (MoE-Infinity
(sequence level), section 4.2), or of an iteration or request ((request level), section 4.1).

Shape suffixes: T tokens, K top_k, R requests, L layers, E experts, N matrices.
"""

import numpy as np
from numpy.typing import NDArray

from predictors.base import Floats, Ints


def count_rows(experts_TK: Ints, request_T: Ints, num_requests: int, num_experts: int) -> Floats:
    """Returns `[R, E]`, one layer's row of each request; `request_T` is each token's request.

    The id E, no choice, is not counted.
    """
    if len(experts_TK) == 1:
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


def eam_distance(first_LE: Floats, second_LE: Floats) -> float:
    """Returns `1 - mean over layers of the cosine of the rows`, in [0, 1].

    MoE-Infinity (sequence level), equation 1. A layer that one side has not seen has cosine 0.
    """
    cosines_L = (normalize_rows(first_LE) * normalize_rows(second_LE)).sum(axis=1)
    return float(1.0 - cosines_L.mean())


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


def layer_decays(num_layers: int) -> Floats:
    """Returns `[L]`: `1 - (i - l) / L` for the layers 1, 2, ... after the current one.

    MoE-Infinity (sequence level), section 5.2 and algorithm 1, step 26; (request level), section
    5.1: linear, at a rate inversely proportional to the number of layers.
    """
    return (1.0 - np.arange(1, num_layers + 1) / num_layers).astype(np.float32)
