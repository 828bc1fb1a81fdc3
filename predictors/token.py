"""The token baseline: how often each token id used each expert in the trace.

ProMoE, section 4.2, "token-based". All layers are forecast before the step begins, which leaves the
most time to fetch, without any context. A token whose id is not known (-1) has no forecast.
"""

from collections.abc import Mapping
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from predictors.base import Floats, Forecast, Forecasts, Ints, Predictor, Signal
from predictors.spec import ModelSpec
from predictors.tensors import read_tensors, write_tensors

PRIOR_TOKENS = 1.0
"""Weight, in tokens, of the shares over all ids when they are mixed with an id's own: they decide
for rare ids, and alone for unseen ones."""


class TokenPredictor(Predictor):
    """Forecasts all layers from a table by token id.

    Shape suffixes: S token ids seen, L layers, E experts, T tokens.
    """

    kind = "token"
    signals = frozenset({Signal.TOKENS})
    stateless = True

    def __init__(
        self,
        spec: ModelSpec,
        ids_S: Ints,
        shares_SLE: NDArray[np.float16],
        unseen_LE: Floats,
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
        """Makes the table from the number of each id's tokens and of their choices."""
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
        return [Forecast(layer, shares_TLE[:, layer]) for layer in range(self.spec.num_layers)]

    def files(self) -> dict[str, bytes]:
        return write_tensors(
            {
                "ids": self._ids_S,
                "shares": self._shares_RLE[:-2],
                "unseen": self._shares_RLE[-2].astype(np.float32),
            }
        )

    @classmethod
    def from_files(
        cls,
        spec: ModelSpec,
        files: Mapping[str, bytes],
        options: Mapping[str, Any],  # noqa: ARG003
    ) -> Self:
        table = (spec.num_layers, spec.num_experts)
        shapes = {"ids": (None,), "shares": (None, *table), "unseen": table}
        arrays = read_tensors(files, shapes, kind=cls.kind)
        return cls(spec, arrays["ids"], arrays["shares"], arrays["unseen"])
