"""Decaying sums of past routing, for the predictors that forecast what is used again.

Shape suffixes: T tokens, N those that are counted, D hidden size, L layers, E experts, K top_k, F
fading sums of an expert, U decays of the counts, P decays of the probabilities.
"""

from typing import Any

import numpy as np

from predictors.base import Floats, Ints, softmax
from predictors.networks.network import kernels

COUNT_DECAYS = (0.5, 0.8, 0.95, 0.99)
CHANCE_DECAYS = (0.8, 0.95)
"""Decay per token: over one or two tokens, a sentence, a paragraph."""

NUM_FADING = len(COUNT_DECAYS) + len(CHANCE_DECAYS)
DECAYS = np.array([*COUNT_DECAYS, *CHANCE_DECAYS], np.float32)


class FadingSums:
    """For each expert, decaying counts of its uses, and sums of its routers' probabilities.

    Args:
        routers_LED, biases_LE: the model's own, for the probabilities of what was not chosen.
    """

    def __init__(self, routers_LED: Floats, biases_LE: Floats):
        self.routers_LED = np.ascontiguousarray(routers_LED, np.float32)
        self.biases_LE = np.ascontiguousarray(biases_LE, np.float32)
        num_layers, num_experts = self.biases_LE.shape
        self._sum_LFE = np.zeros((num_layers, NUM_FADING, num_experts), np.float32)

    def tensors(self) -> dict[str, Floats]:
        """Returns what an entry keeps: the routers and their biases."""
        return {"routers": self.routers_LED, "biases": self.biases_LE}

    def add(
        self, layer: int, experts_NK: Ints, hidden_ND: Floats, *, is_one_request: bool
    ) -> Floats:
        """Adds tokens of one request, or the mean of one token of each request.

        Returns `[F, E]`: the sums as means in [0, 1], the input of networks. The id E is no expert.
        """
        sum_FE = self._sum_LFE[layer]
        if is_one_request and kernels is not None:
            means_FE = np.empty_like(sum_FE)
            router_ED, bias_E = self.routers_LED[layer], self.biases_LE[layer]
            for experts, hidden_D in zip(experts_NK.tolist(), hidden_ND, strict=True):
                kernels.fade_token(
                    sum_FE,
                    DECAYS,
                    len(COUNT_DECAYS),
                    experts,
                    hidden_D,
                    router_ED,
                    bias_E,
                    means_FE,
                )
            return means_FE
        chance_NE = softmax(hidden_ND @ self.routers_LED[layer].T + self.biases_LE[layer])
        if is_one_request:
            for experts_K, chance_E in zip(experts_NK, chance_NE, strict=True):
                fade_token(sum_FE, experts_K, chance_E)
        else:
            used_NE = mark_used(experts_NK, sum_FE.shape[1])
            fade(sum_FE, used_NE.mean(axis=0), chance_NE.mean(axis=0))
        return np.asarray(normalize_sums(sum_FE))


def mark_used(experts_TK: Ints, num_experts: int) -> Floats:
    """Returns `[T, E]`: 1 where the token is routed to the expert; the id `num_experts` is none."""
    used_TE = np.zeros((len(experts_TK), num_experts + 1), np.float32)
    np.put_along_axis(used_TE, experts_TK, 1.0, axis=1)
    return used_TE[:, :num_experts]


def fade_token(state_FE: Floats, experts_K: Ints, chance_E: Floats) -> None:
    """Adds one token to a layer's sums in place: as `fade`, without marking what it does not use.

    The id `num_experts` is none.
    """
    state_FE *= DECAYS[:, None]
    num_experts = state_FE.shape[1]
    state_FE[: len(COUNT_DECAYS), [e for e in set(experts_K.tolist()) if e < num_experts]] += 1.0
    state_FE[len(COUNT_DECAYS) :] += chance_E


def fade(state: Floats, used_E: Floats, chance_E: Floats) -> None:
    """Adds a token to `state [..., U + P, E]` in place, for any leading axes."""
    state *= DECAYS[:, None]
    state[..., : len(COUNT_DECAYS), :] += used_E[..., None, :]
    state[..., len(COUNT_DECAYS) :, :] += chance_E[..., None, :]


def normalize_sums(state: Floats) -> Any:
    """Returns each decaying sum as a mean in [0, 1], the input of the networks."""
    return state * (1 - DECAYS[:, None])
