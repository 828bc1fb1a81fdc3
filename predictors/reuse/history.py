"""What a layer's experts were used for lately: counts and router probabilities that fade.

Shape suffixes: T tokens, E experts, K top_k, U decays of the counts, P decays of the
probabilities.
"""

from typing import Any

import numpy as np

from predictors.base import Floats, Ints

COUNT_DECAYS = (0.5, 0.8, 0.95, 0.99)
CHANCE_DECAYS = (0.8, 0.95)
"""Per token: the last one or two, a sentence, a paragraph."""

NUM_FADING = len(COUNT_DECAYS) + len(CHANCE_DECAYS)
DECAYS = np.array([*COUNT_DECAYS, *CHANCE_DECAYS], np.float32)


def mark_used(experts_TK: Ints, num_experts: int) -> Floats:
    """`[T, E]`: 1 where the token is routed to the expert.

    Choices of none, written as `num_experts`, are left out.
    """
    used_TE = np.zeros((len(experts_TK), num_experts + 1), np.float32)
    np.put_along_axis(used_TE, experts_TK, 1.0, axis=1)
    return used_TE[:, :num_experts]


def softmax(logits_TE: Floats) -> Floats:
    shifted_TE = np.exp(logits_TE - logits_TE.max(axis=-1, keepdims=True))
    return shifted_TE / shifted_TE.sum(axis=-1, keepdims=True)


def fade(state: Floats, used_E: Floats, chance_E: Floats) -> None:
    """One token more: `state [..., U + P, E]` in place, for any leading axes."""
    state *= DECAYS[:, None]
    state[..., : len(COUNT_DECAYS), :] += used_E[..., None, :]
    state[..., len(COUNT_DECAYS) :, :] += chance_E[..., None, :]


def normalize_sums(state: Floats) -> Any:
    """Each decaying sum as a mean in [0, 1]: what the networks see."""
    return state * (1 - DECAYS[:, None])
