"""Recent use of a layer's experts: decaying sums of counts and router probabilities.

Shape suffixes: T tokens, E experts, K top_k, U decays of the counts, P decays of the
probabilities.
"""

from typing import Any

import numpy as np

from predictors.base import Floats, Ints

COUNT_DECAYS = (0.5, 0.8, 0.95, 0.99)
CHANCE_DECAYS = (0.8, 0.95)
"""Decay per token: over one or two tokens, a sentence, a paragraph."""

NUM_FADING = len(COUNT_DECAYS) + len(CHANCE_DECAYS)
DECAYS = np.array([*COUNT_DECAYS, *CHANCE_DECAYS], np.float32)


def mark_used(experts_TK: Ints, num_experts: int) -> Floats:
    """Returns `[T, E]`: 1 where the token is routed to the expert; the id `num_experts` is none."""
    used_TE = np.zeros((len(experts_TK), num_experts + 1), np.float32)
    np.put_along_axis(used_TE, experts_TK, 1.0, axis=1)
    return used_TE[:, :num_experts]


def softmax(logits_TE: Floats) -> Floats:
    shifted_TE = np.exp(logits_TE - logits_TE.max(axis=-1, keepdims=True))
    return shifted_TE / shifted_TE.sum(axis=-1, keepdims=True)


def fade(state: Floats, used_E: Floats, chance_E: Floats) -> None:
    """Adds a token to `state [..., U + P, E]` in place, for any leading axes."""
    state *= DECAYS[:, None]
    state[..., : len(COUNT_DECAYS), :] += used_E[..., None, :]
    state[..., len(COUNT_DECAYS) :, :] += chance_E[..., None, :]


def normalize_sums(state: Floats) -> Any:
    """Returns each decaying sum as a mean in [0, 1], the input of the networks."""
    return state * (1 - DECAYS[:, None])
