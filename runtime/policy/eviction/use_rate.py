"""The rate at which experts are used in the time that an expert stays in the cache.

Shape suffixes: E experts, H horizons.
"""

import numpy as np
from numpy.typing import NDArray

from predictors.base import HORIZONS

LEAST_USES = 1e-3
"""Uses of a layer by a token that are assumed at least."""

FARTHER = (np.array([0, *HORIZONS[:-1]]) + 1 + np.array(HORIZONS)) / 2
"""Middle of the tokens between one horizon and the next."""


def discounted_rate(chance_HE: NDArray[np.floating], slots_per_layer: float) -> NDArray[np.float64]:
    """Returns `[E]`, in [0, 1]: the share of tokens that use each expert, near ones counting most.

    An expert that stays in the cache for n tokens is worth keeping if it is used within about so
    many: a use after t tokens counts `g^t`, and the mean of these weights, n, is what the slots of
    a layer hold of the uses of a token. From the discounted next use `x = E[g^t]` follows the share
    `r` that would give it if every token used the expert with the same probability, by
    `x = r g / (1 - g + g r)`.

    Args:
        chance_HE: Probabilities of a use within each of `HORIZONS`.
        slots_per_layer: Mean slots of a layer.
    """
    chance_HE = np.asarray(chance_HE, np.float64)
    kept = slots_per_layer / max(float(chance_HE[0].sum()), LEAST_USES)
    discount = kept / (1.0 + kept)
    weight_H = discount**FARTHER
    weight_H[:-1] -= weight_H[1:]
    x_E = np.clip(weight_H @ chance_HE, 0.0, discount)
    return np.asarray(x_E * (1.0 - discount) / (discount * (1.0 - x_E)))
