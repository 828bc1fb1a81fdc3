"""Expert correlation table, from a token's experts in one layer to the next (Klotski, section 6.2).

Shape suffixes: T tokens, K top_k, L layers, E experts of a layer, F experts of the layer before.
"""

from typing import Self

import numpy as np
from numpy.typing import NDArray

from predictors.base import Floats, Forecast, Forecasts, Ints, Signal
from predictors.errors import PredictorError
from predictors.spec import ModelSpec
from predictors.stored import Shapes, StoredPredictor


class CorrelationPredictor(StoredPredictor):
    """Counts how often tokens went from one expert to another; correlation paths of length 1.

    A token's tendency to an expert is the mean, over its experts in the previous layer, of the
    share of tokens with that expert that went on to this one. The `hot` experts with the largest
    sum of tendencies over all tokens of the step are fetched, across batches ("we then aggregate
    the tendencies of all tokens across multiple batches and select the top-K"). Layer 0 has no
    previous layer: its experts' own shares are used.

    Counting continues during serving, and an entry keeps the initial counts ("we refrain from
    saving the updates"); `as_learned` has them all. The initial counts weigh at most `prior_tokens`
    tokens, so that the updates have an effect (section 8).

    Args:
        pairs_LFE: tokens with expert f in layer l-1 and e in layer l; row 0 is not used.
        uses_LE: tokens with expert e in layer l.
        hot: K; "by default equal to k in top-k".
        least: in place of `hot`: all experts that at least this number of tokens is expected to
            use. Ours: fetching likelier ones only, at .3, saved up to 3 % of the time per output
            token at small budgets, where fetching `top_k` cost 1 to 2 %.
        prior_tokens: the paper fills its table with 8 sequences of 512 tokens.
    """

    kind = "correlation"
    signals = frozenset({Signal.TOKENS, Signal.ROUTED})

    def __init__(
        self,
        spec: ModelSpec,
        pairs_LFE: Floats,
        uses_LE: Floats,
        *,
        hot: int | None = None,
        least: float | None = None,
        prior_tokens: int = 4_096,
        learning: bool = True,
    ):
        super().__init__(spec)
        experts = spec.num_experts
        assert pairs_LFE.shape == (spec.num_layers, experts, experts)
        assert uses_LE.shape == (spec.num_layers, experts)
        if hot is not None and not 1 <= hot <= experts:
            raise PredictorError(f"{self.kind} with hot={hot}: the model has {experts} experts")
        if least is not None and (hot is not None or least <= 0):
            raise PredictorError(f"{self.kind} with least={least}, hot={hot}: one, above 0")
        if prior_tokens < 1:
            raise PredictorError(f"{self.kind} with prior_tokens={prior_tokens}: at least 1")
        self.hot = hot
        self.least = least
        self.prior_tokens = prior_tokens
        self.learning = learning
        self._fitted = pairs_LFE.astype(np.float32), uses_LE.astype(np.float32)
        tokens = uses_LE[0].sum() / spec.top_k
        weight = np.float32(min(1.0, prior_tokens / max(1.0, tokens)))
        self._pairs_LFE, self._uses_LE = (table * weight for table in self._fitted)
        self._before_TK: Ints | None = None

    @property
    def shares_LE(self) -> Floats | None:
        """Share of tokens with each expert so far; None before the first token."""
        tokens_L = self._uses_LE.sum(axis=1, keepdims=True) / self.spec.top_k
        return None if (tokens_L < 1).any() else self._uses_LE / tokens_L

    def begin_step(self, tokens_T: Ints, requests_T: Ints) -> Forecasts:  # noqa: ARG002
        self._before_TK = None
        made = self._uses_LE[0].sum() / self.spec.top_k
        share_E = self._uses_LE[0] / max(1.0, float(made))
        shape = (len(tokens_T), self.spec.num_experts)
        return [self._forecast(0, np.broadcast_to(np.minimum(share_E, 1.0), shape))]

    def routed(self, layer: int, experts_TK: Ints, logits_TE: Floats | None) -> Forecasts:  # noqa: ARG002
        forecasts: tuple[Forecast, ...] = ()
        if layer + 1 < self.spec.num_layers:
            # Before these tokens are counted, as their next experts are not known yet.
            forecasts = (self._forecast(layer + 1, self._tendencies(layer + 1, experts_TK)),)
        if self.learning:
            self._count(layer, experts_TK)
        self._before_TK = experts_TK.copy()
        return forecasts

    def end_step(self) -> None:
        self._before_TK = None

    def _tendencies(self, layer: int, before_TK: Ints) -> Floats:
        none = self.spec.num_experts
        safe_TK = np.minimum(before_TK, none - 1)
        uses_TK = np.maximum(self._uses_LE[layer - 1, safe_TK], 1e-9)
        weight_TK = (before_TK < none) / uses_TK
        rows_TKE = self._pairs_LFE[layer, safe_TK]
        tendency_TE = np.einsum("tke,tk->te", rows_TKE, weight_TK) / before_TK.shape[1]
        return np.minimum(tendency_TE, 1.0).astype(np.float32)

    def _forecast(self, layer: int, scores_TE: Floats) -> Forecast:
        expected_E = scores_TE.sum(axis=0)
        if self.least is not None:
            likely = np.flatnonzero(expected_E >= self.least)
            return Forecast(layer, scores_TE, wanted=likely.tolist())
        hot = self.spec.top_k if self.hot is None else self.hot
        hottest = np.argsort(-expected_E, kind="stable")[:hot]
        return Forecast(layer, scores_TE, wanted=hottest.tolist())

    def _count(self, layer: int, experts_TK: Ints) -> None:
        num_experts = self.spec.num_experts
        chosen = experts_TK < num_experts
        self._uses_LE[layer] += np.bincount(experts_TK[chosen], minlength=num_experts)
        if layer == 0 or self._before_TK is None:
            return
        both = (self._before_TK < num_experts)[:, :, None] & chosen[:, None, :]
        flat_N = (self._before_TK[:, :, None] * num_experts + experts_TK[:, None, :])[both]
        pairs_FE = self._pairs_LFE[layer].reshape(-1)
        if len(flat_N) < pairs_FE.size:
            np.add.at(pairs_FE, flat_N, 1.0)
        else:  # a prompt: 40 times faster
            pairs_FE += np.bincount(flat_N, minlength=pairs_FE.size)

    def arrays(self) -> dict[str, NDArray]:
        pairs_LFE, uses_LE = self._fitted
        return {"pairs": pairs_LFE, "uses": uses_LE}

    def as_learned(self) -> Self:
        return type(self)(self.spec, self._pairs_LFE, self._uses_LE, **self.options())

    @classmethod
    def shapes(cls, spec: ModelSpec) -> Shapes:
        layers, experts = spec.num_layers, spec.num_experts
        return {"pairs": (layers, experts, experts), "uses": (layers, experts)}
