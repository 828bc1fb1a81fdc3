"""Contexts: decaying means of a request's earlier states.

Shape suffixes: L layers, N rows, D hidden size.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from collect.traces.column import Column
from predictors.base import Floats

WARM_UP = 24
"""Rows read before the first of a run: at a decay of .8 what came before them weighs .005."""


def request_runs(
    rows_N: NDArray[np.int64], requests: NDArray[np.int32]
) -> Iterator[tuple[int, int]]:
    """Places `(first, last)` in `rows_N`, whose rows follow each other within one request."""
    if not len(rows_N):
        return
    same = (np.diff(rows_N) == 1) & (np.diff(requests[rows_N]) == 0)
    ends = [*(np.flatnonzero(~same) + 1).tolist(), len(rows_N)]
    yield from zip([0, *ends[:-1]], ends, strict=True)


def read_contexts(
    columns: Sequence[Column],
    rows_N: NDArray[np.int64],
    *,
    requests: NDArray[np.int32],
    decays: Sequence[float],
) -> tuple[NDArray[np.float16], Floats]:
    """Returns `([G, L, N, D], [G, N])`: the contexts of the rows and the sums of their weights.

    A context is `(1 - d) sum over j of d^j x(t - 1 - j)` over the request's earlier rows, for each
    decay d. `rows_N` ascends; there is a column for each layer.
    """
    width = columns[0].shape[1]
    found = np.zeros((len(decays), len(columns), len(rows_N), width), np.float16)
    weight_GN = np.zeros((len(decays), len(rows_N)), np.float32)
    for first, last in request_runs(rows_N, requests):
        row = int(rows_N[first])
        start = max(row - WARM_UP, int(np.searchsorted(requests, requests[row])))
        past = np.stack([column[start : int(rows_N[last - 1])] for column in columns], axis=1)
        # The row at `start` has no past that is looked at; row t has the mean over those before.
        for g, decay in enumerate(decays):
            mean_TLD, weight_T = decaying_means(past.astype(np.float32), decay)
            found[g, :, first:last] = mean_TLD[row - start :].swapaxes(0, 1)
            weight_GN[g, first:last] = weight_T[row - start :]
    return found, weight_GN


def decaying_means(past_PLD: Floats, decay: float) -> tuple[Floats, Floats]:
    """`([P + 1, L, D], [P + 1])`: the mean before each row and behind the last, and its weight."""
    num_rows = len(past_PLD)
    mean_TLD = np.zeros((num_rows + 1, *past_PLD.shape[1:]), np.float32)
    weight_T = 1 - np.power(decay, np.arange(num_rows + 1, dtype=np.float32))
    if decay == 0:
        mean_TLD[1:] = past_PLD
        return mean_TLD, weight_T.astype(np.float32)
    for t in range(num_rows):
        np.multiply(past_PLD[t], 1 - decay, out=mean_TLD[t + 1])
        mean_TLD[t + 1] += decay * mean_TLD[t]
    return mean_TLD, weight_T.astype(np.float32)
