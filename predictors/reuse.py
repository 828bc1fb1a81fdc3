"""The reuse predictor: the use of each expert over the coming tokens, for eviction.

Not from a paper. If the link is the bottleneck, earlier fetching cannot help, but keeping the right
experts can. The value of an expert is `(1 - gamma) / gamma * sum over t > 0 of gamma^t used(t)`, in
[0, 1]: its discounted use over the coming tokens. Belady's policy evicts by the next use; this is
an expectation of it, from decaying sums of past routing.

Shape suffixes: T tokens, N those that are counted, D hidden size, L layers, E experts, K top_k, F
fading sums of an expert, X = F E, U decays of the counts, P decays of the probabilities.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from predictors.base import Floats, Forecast, Forecasts, Ints, Signal, softmax
from predictors.errors import PredictorError
from predictors.metrics import mark_used
from predictors.networks import kernels
from predictors.spec import ModelSpec
from predictors.stored import INPUT, OUTPUT, Paths, StoredPredictor

MEANS = "means"
"""Name of the fading means in a graph: `hidden [T, D]` and `means [T, F E]` to `scores [T, E]`."""

LONGEST_MEMORY = 64
"""Tokens at the end of a prompt that are counted one by one; earlier ones, decayed by half or more,
are left out."""

COUNT_DECAYS = (0.5, 0.8, 0.95, 0.99)
CHANCE_DECAYS = (0.8, 0.95)
"""Decay per token: over one or two tokens, a sentence, a paragraph."""

NUM_FADING = len(COUNT_DECAYS) + len(CHANCE_DECAYS)
DECAYS = np.array([*COUNT_DECAYS, *CHANCE_DECAYS], np.float32)


class ReusePredictor(StoredPredictor):
    """Answers `routed` with one row: the value of the layer's experts after this step.

    It does not forecast the step itself: its scores are for eviction, not for prefetching.

    Args:
        graphs: a whole ONNX file for each layer: `hidden [T, D]`, the gate input, and `means
            [T, F E]` to `scores [T, E]`.
    """

    kind = "reuse"
    signals = frozenset({Signal.GATE_INPUT, Signal.ROUTED, Signal.LOGITS})

    def __init__(self, spec: ModelSpec, graphs: Mapping[int, bytes]):
        super().__init__(spec)
        widths = {INPUT: spec.hidden_size, MEANS: NUM_FADING * spec.num_experts}
        self._networks = self.open_layer_networks(graphs, widths)
        self._fading = FadingSums(spec.num_layers, spec.num_experts)
        self._hidden_ND = np.zeros((0, spec.hidden_size), np.float32)
        self._rows: Ints | slice = slice(0)
        self._is_alone = True

    def begin_step(self, tokens_T: Ints, requests_T: Ints) -> Forecasts:  # noqa: ARG002
        """Chooses the tokens to count: a request's last ones, or the last one of each request.

        Tokens of one request are consecutive.
        """
        is_last_T = np.append(requests_T[1:] != requests_T[:-1], True)
        self._is_alone = int(is_last_T.sum()) == 1
        self._rows = slice(-LONGEST_MEMORY, None) if self._is_alone else np.flatnonzero(is_last_T)
        return ()

    def gate_input(self, layer: int, hidden_TD: Floats) -> Forecasts:  # noqa: ARG002
        self._hidden_ND = np.ascontiguousarray(hidden_TD[self._rows], np.float32)
        return ()

    def routed(self, layer: int, experts_TK: Ints, logits_TE: Floats | None) -> Forecasts:
        """Updates the decaying sums with the step's tokens and returns the values.

        With several requests, the values are means over the requests, as they share the cache.
        """
        if logits_TE is None:
            raise PredictorError(f"the router of layer {layer} gives no logits")
        experts_NK, hidden_ND = experts_TK[self._rows], self._hidden_ND
        means_FE = self._fading.add(
            layer, experts_NK, logits_TE[self._rows], is_one_request=self._is_alone
        )
        means_NX = means_FE.reshape(1, -1)
        if self._is_alone:
            hidden_ND = hidden_ND[-1:]
        else:
            means_NX = means_NX.repeat(len(hidden_ND), axis=0)
        (value_NE,) = self._networks[layer].run([OUTPUT], {INPUT: hidden_ND, MEANS: means_NX})
        if len(value_NE) > 1:
            value_NE = value_NE.mean(axis=0, keepdims=True)
        return [Forecast(layer, value_NE)]

    def count_input_rows(self, requests_T: Ints) -> int:
        num_requests = len(set(requests_T.tolist()))
        return num_requests if num_requests > 1 else min(len(requests_T), LONGEST_MEMORY)

    @classmethod
    def graph_paths(cls, spec: ModelSpec) -> Paths:
        return {layer: f"predictors/reuse_{layer:02d}.onnx" for layer in range(spec.num_layers)}


class FadingSums:
    """For each expert, decaying counts of its uses, and sums of its routers' probabilities."""

    def __init__(self, num_layers: int, num_experts: int):
        # A view of each layer is made once.
        self._sums_FE = [*np.zeros((num_layers, NUM_FADING, num_experts), np.float32)]
        self._means_FE = np.empty((NUM_FADING, num_experts), np.float32)

    def add(
        self, layer: int, experts_NK: Ints, logits_NE: Floats, *, is_one_request: bool
    ) -> Floats:
        """Adds tokens of one request, or the mean of one token of each request.

        Returns `[F, E]`, valid until the next call: the sums as means in [0, 1], the input of
        networks. The id E is no expert. A token without finite probabilities is left out: it would
        stay in the sums for ever.
        """
        sum_FE = self._sums_FE[layer]
        if is_one_request and kernels is not None:
            means_FE = self._means_FE
            for experts, logits_E in zip(experts_NK.tolist(), logits_NE, strict=True):
                kernels.fade_token(sum_FE, DECAYS, len(COUNT_DECAYS), experts, logits_E, means_FE)
            return means_FE
        chance_NE = softmax(logits_NE)
        is_finite_N = np.isfinite(chance_NE).all(axis=1)
        if not is_finite_N.all():
            experts_NK, chance_NE = experts_NK[is_finite_N], chance_NE[is_finite_N]
        if is_one_request:
            for experts_K, chance_E in zip(experts_NK, chance_NE, strict=True):
                fade_token(sum_FE, experts_K, chance_E)
        elif len(chance_NE):
            used_NE = mark_used(experts_NK, sum_FE.shape[1])
            fade(sum_FE, used_NE.mean(axis=0), chance_NE.mean(axis=0))
        return np.asarray(normalize_sums(sum_FE))


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
