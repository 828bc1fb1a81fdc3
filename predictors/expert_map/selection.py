"""How many experts of a searched map to prefetch (fmoe 4.3).

Shape suffixes: T tokens, E experts.
"""

import numpy as np
from numpy.typing import NDArray

from predictors.base import Floats


def threshold(score_T: Floats) -> Floats:
    """`delta = clip(1 - score, 0, 1)`: the less alike, the more experts."""
    return np.clip(1.0 - score_T, 0.0, 1.0)


def selected(probability_TE: Floats, delta_T: Floats, top_k: int) -> NDArray[np.bool_]:
    """`[T, E]`: the fewest likeliest experts whose probabilities sum to at least delta, and no
    fewer than `top_k` (equations 6 to 8).
    """
    order_TE = np.argsort(-probability_TE, axis=1, kind="stable")
    tokens_T1 = np.arange(len(order_TE))[:, None]
    summed_TE = np.cumsum(probability_TE[tokens_T1, order_TE], axis=1)
    needed_T = np.maximum((summed_TE < delta_T[:, None]).sum(axis=1) + 1, top_k)
    kept_TE = np.zeros(probability_TE.shape, np.bool_)
    kept_TE[tokens_T1, order_TE] = np.arange(probability_TE.shape[1]) < needed_T[:, None]
    return kept_TE
