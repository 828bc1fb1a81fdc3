"""Baselines without learned networks: popularity, dependency, skip and token.

Shape suffixes: S token ids seen, L layers, E experts, D hidden size, T tokens.
"""

from collections.abc import Sequence
from typing import Self

import numpy as np
from numpy.typing import NDArray

from predictors.base import ConsecutiveForecasts, Floats, Forecast, Forecasts, Ints, Signal, softmax
from predictors.errors import PredictorError
from predictors.spec import ModelSpec
from predictors.stored import Shapes, StoredPredictor

PRIOR_TOKENS = 1.0
"""Weight, in tokens, of the shares over all ids when they are mixed with an id's own: they decide
for rare ids, and alone for unseen ones."""


class PopularityPredictor(StoredPredictor):
    """Forecasts the experts that the trace used most, the same for every token.

    With `ahead=1`, it is BrainStorm's "Traced-TopK" (MoE-Infinity (sequence level), section 8.3).

    Args:
        shares_LE: share of the trace's tokens that layer l routed to expert e.
        tokens_L: tokens that a layer's shares weigh; None: `PRIOR_TOKENS`.
        ahead: layers that are forecast as each one is routed, and the first ones at the start
            of the step; None is all layers at the start of the step.
        learning: go on counting while serving, "across the entire lifetime of the serving system"
            (MoE-Infinity (request level), section 7.2); the trace counts as one token.
    """

    kind = "popularity"
    optional = frozenset({"tokens"})
    signals = frozenset({Signal.TOKENS})
    stateless = True

    def __init__(
        self,
        spec: ModelSpec,
        shares_LE: Floats,
        tokens_L: Floats | None = None,
        *,
        ahead: int | None = None,
        learning: bool = False,
    ):
        super().__init__(spec)
        assert shares_LE.shape == (spec.num_layers, spec.num_experts)
        if ahead is not None and ahead < 1:
            raise PredictorError(f"{self.kind} with ahead={ahead}: at least 1, or null for all")
        self.ahead = ahead
        self.learning = learning
        if learning:
            self.stateless = False  # type: ignore[misc]
        if ahead is not None or learning:
            self.signals = frozenset({Signal.TOKENS, Signal.ROUTED})  # type: ignore[misc]
        self._fitted = {"shares": shares_LE.astype(np.float32)}
        self._tokens_L = np.full(spec.num_layers, PRIOR_TOKENS)
        """Tokens that each layer's counts are of."""
        if tokens_L is not None:
            self._tokens_L = np.maximum(tokens_L.astype(np.float64), PRIOR_TOKENS)
            self._fitted["tokens"] = self._tokens_L.copy()
        self._shares_LE = self._fitted["shares"].copy()
        self._counts_LE = self._tokens_L[:, None] * shares_LE.astype(np.float64)
        self._num_tokens = 0

    def begin_step(self, tokens_T: Ints, requests_T: Ints) -> Forecasts:  # noqa: ARG002
        self._num_tokens = len(tokens_T)
        return self._forecast_layers(range(self.spec.num_layers)[: self.ahead])

    def routed(self, layer: int, experts_TK: Ints, logits_TE: Floats | None) -> Forecasts:  # noqa: ARG002
        if self.learning:
            num_experts = self.spec.num_experts
            counts = np.bincount(experts_TK.ravel(), minlength=num_experts)[:num_experts]
            self._counts_LE[layer] += counts
            self._tokens_L[layer] += len(experts_TK)
            shares_E = self._counts_LE[layer] / self._tokens_L[layer]
            self._shares_LE[layer] = np.minimum(shares_E, 1.0)
        return () if self.ahead is None else self._forecast_layers([layer + self.ahead])

    def _forecast_layers(self, layers: Sequence[int]) -> list[Forecast]:
        # All tokens share one row, which does not change with later counts.
        shape = (self._num_tokens, self.spec.num_experts)
        return [
            Forecast(layer, np.broadcast_to(self._shares_LE[layer].copy(), shape))
            for layer in layers
            if layer < self.spec.num_layers
        ]

    def arrays(self) -> dict[str, Floats]:
        return self._fitted

    def as_learned(self) -> Self:
        return type(self)(self.spec, self._shares_LE, self._tokens_L, **self.options())

    @classmethod
    def shapes(cls, spec: ModelSpec) -> Shapes:
        return {"shares": (spec.num_layers, spec.num_experts), "tokens": (spec.num_layers,)}


class DependencyPredictor(StoredPredictor):
    """Forecasts every expert of the next layer, in the order of their ids.

    DeepSpeed-Inference prefetches so (MoE-Infinity (request level), section 5.1, figure 6a), as
    does ZeRO-Infinity with the first ids only (MoE-Infinity (sequence level), section 8.3,
    "TopK"): any expert may follow any expert of the layer before. Layer 0 is forecast when the step
    begins, layer l+1 when layer l is routed.
    """

    kind = "dependency"
    signals = frozenset({Signal.TOKENS, Signal.ROUTED})
    stateless = True

    def __init__(self, spec: ModelSpec):
        super().__init__(spec)
        self._num_tokens = 0
        self._wanted = list(range(spec.num_experts))

    def begin_step(self, tokens_T: Ints, requests_T: Ints) -> Forecasts:  # noqa: ARG002
        self._num_tokens = len(tokens_T)
        return [self._forecast_all(0)]

    def routed(self, layer: int, experts_TK: Ints, logits_TE: Floats | None) -> Forecasts:  # noqa: ARG002
        return [self._forecast_all(layer + 1)] if layer + 1 < self.spec.num_layers else ()

    def _forecast_all(self, layer: int) -> Forecast:
        spec = self.spec
        even = np.float32(spec.top_k / spec.num_experts)
        scores_TE = np.broadcast_to(even, (self._num_tokens, spec.num_experts))
        return Forecast(layer, scores_TE, wanted=self._wanted)


class SkipPredictor(StoredPredictor):
    """Forecasts layer l + `horizon` with that layer's router, applied to this layer's gate input.

    Mixtral-offloading's predictor (ProMoE, section 4.2). It needs no training: the residual stream
    changes slowly from layer to layer, so the next router approximates its own choice.
    """

    kind = "skip"
    optional = frozenset({"biases"})
    signals = frozenset({Signal.GATE_INPUT})
    stateless = True

    def __init__(
        self,
        spec: ModelSpec,
        routers_LED: Floats,
        biases_LE: Floats | None = None,
        *,
        horizon: int = 1,
    ):
        super().__init__(spec)
        assert routers_LED.shape == (spec.num_layers, spec.num_experts, spec.hidden_size)
        if not 1 <= horizon < spec.num_layers:
            raise PredictorError(
                f"skip with horizon {horizon}: the model has {spec.num_layers} layers with experts"
            )
        self.horizon = horizon
        self._routers_LED = routers_LED.astype(np.float32)
        self._biases_LE = None if biases_LE is None else biases_LE.astype(np.float32)

    def gate_input(self, layer: int, hidden_TD: Floats) -> Forecasts:
        target = layer + self.horizon
        if target >= self.spec.num_layers:
            return ()
        logits_TE = hidden_TD @ self._routers_LED[target].T
        if self._biases_LE is not None:
            logits_TE += self._biases_LE[target]
        # The probability that each expert is chosen. At most `top_k` experts reach 1, so the limit
        # does not change which are the best.
        chance_TE = np.minimum(self.spec.top_k * softmax(logits_TE), 1.0)
        return [Forecast(target, chance_TE.astype(np.float32))]

    def arrays(self) -> dict[str, Floats]:
        biases = {} if self._biases_LE is None else {"biases": self._biases_LE}
        return {"routers": self._routers_LED, **biases}

    @classmethod
    def shapes(cls, spec: ModelSpec) -> Shapes:
        table = (spec.num_layers, spec.num_experts)
        return {"routers": (*table, spec.hidden_size), "biases": table}


class TokenPredictor(StoredPredictor):
    """Forecasts all layers from how often each token id used each expert in the trace.

    ProMoE, section 4.2, "token-based". All layers are forecast before the step begins, which leaves
    the most time to fetch, without any context. A token whose id is not known (-1) has no forecast.
    """

    kind = "token"
    signals = frozenset({Signal.TOKENS})
    stateless = True

    def __init__(
        self, spec: ModelSpec, ids_S: Ints, shares_SLE: NDArray[np.float16], unseen_LE: Floats
    ):
        """Makes the table; `ids` are ascending, `shares` in half precision to save memory."""
        super().__init__(spec)
        assert shares_SLE.shape == (len(ids_S), spec.num_layers, spec.num_experts)
        assert (np.diff(ids_S) > 0).all()
        self._ids_S = ids_S.astype(np.int64)
        # Two more rows: for ids that are not in the trace, and zeros for unknown ids.
        extra_2LE = np.stack([unseen_LE, np.zeros_like(unseen_LE)]).astype(np.float16)
        self._shares_RLE = np.concatenate([shares_SLE, extra_2LE])

    @classmethod
    def from_counts(cls, spec: ModelSpec, ids_S: Ints, counts_SLE: Ints, uses_S: Ints) -> Self:
        unseen_LE = counts_SLE.sum(axis=0) / max(1, uses_S.sum())
        smoothed = counts_SLE + PRIOR_TOKENS * unseen_LE
        shares = smoothed / (uses_S[:, None, None] + PRIOR_TOKENS)
        return cls(spec, ids_S, shares.astype(np.float16), unseen_LE.astype(np.float32))

    def begin_step(self, tokens_T: Ints, requests_T: Ints) -> Forecasts:  # noqa: ARG002
        if (tokens_T < 0).all():
            return ()  # Prompts of embeddings have no ids.
        position_T = np.searchsorted(self._ids_S, tokens_T)
        near_T = np.minimum(position_T, len(self._ids_S) - 1)
        unseen = len(self._ids_S)
        row_T = np.where(self._ids_S[near_T] == tokens_T, near_T, unseen) if unseen else position_T
        row_T = np.where(tokens_T < 0, unseen + 1, row_T)
        shares_TLE = self._shares_RLE[row_T].astype(np.float32)
        return ConsecutiveForecasts(0, shares_TLE)

    def arrays(self) -> dict[str, NDArray]:
        seen_SLE, unseen_LE = self._shares_RLE[:-2], self._shares_RLE[-2].astype(np.float32)
        return {"ids": self._ids_S, "shares": seen_SLE, "unseen": unseen_LE}

    @classmethod
    def shapes(cls, spec: ModelSpec) -> Shapes:
        table = (spec.num_layers, spec.num_experts)
        return {"ids": (None,), "shares": (None, *table), "unseen": table}
