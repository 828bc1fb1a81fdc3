"""Token: how often each token id used each expert in the trace (promoe 4.2, "token-based").

All layers of the iteration are forecast before it begins, so there is all the time in the world
to fetch, and no context to tell one use of a word from another. Nothing is said of a token whose id
is not known (-1).
"""

from collections.abc import Mapping
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from predictors.base import Floats, Forecast, Forecasts, Ints, Predictor, Signal
from predictors.spec import ModelSpec
from predictors.tensors import read_tensors, write_tensors

PRIOR_TOKENS = 1.0
"""Weight, in tokens, of the overall shares beside a token id's own: it decides what a rare id's
few uses leave open, and is all that an unseen id gets."""


class TokenPredictor(Predictor):
    """Shape suffixes: S token ids seen, L layers, E experts, T tokens."""

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
        """`ids` ascending; `shares` half precision, for a real vocabulary makes it large."""
        super().__init__(spec)
        assert shares_SLE.shape == (len(ids_S), spec.num_layers, spec.num_experts)
        assert (np.diff(ids_S) > 0).all()
        self._ids_S = ids_S.astype(np.int64)
        # Behind the last one, a row for every id that the trace did not have, and one of zeros for
        # tokens whose id is not known.
        extra_2LE = np.stack([unseen_LE, np.zeros_like(unseen_LE)]).astype(np.float16)
        self._shares_RLE = np.concatenate([shares_SLE, extra_2LE])

    @classmethod
    def from_counts(cls, spec: ModelSpec, ids_S: Ints, counts_SLE: Ints, uses_S: Ints) -> Self:
        """From how often each id came (`uses`) and which experts each layer then chose."""
        unseen_LE = counts_SLE.sum(axis=0) / max(1, uses_S.sum())
        smoothed = counts_SLE + PRIOR_TOKENS * unseen_LE
        shares = smoothed / (uses_S[:, None, None] + PRIOR_TOKENS)
        return cls(spec, ids_S, shares.astype(np.float16), unseen_LE.astype(np.float32))

    def begin_step(self, tokens_T: Ints, requests_T: Ints) -> Forecasts:  # noqa: ARG002
        if (tokens_T < 0).all():
            return ()  # Prompts given as embeddings have no ids.
        place_T = np.searchsorted(self._ids_S, tokens_T)
        near_T = np.minimum(place_T, len(self._ids_S) - 1)
        unseen = len(self._ids_S)
        row_T = np.where(self._ids_S[near_T] == tokens_T, near_T, unseen) if unseen else place_T
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
