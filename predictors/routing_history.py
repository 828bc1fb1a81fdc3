"""The routing of the latest tokens, and those of them that came after the same text as now.

Shape suffixes: T tokens of the step, L layers, W window, K top_k, E experts.
"""

import numpy as np

from predictors.base import Floats, Ints
from predictors.spec import ModelSpec

WINDOW = 4096
"""Tokens that are remembered."""

MATCHED = (4, 2)
"""Numbers of tokens that have to be equal; the first that finds a place is taken."""

NUM_FOLLOWING = 16
"""Tokens behind the same text that are looked at."""

FOLLOWING_DECAY = 0.8
"""Decay of their weights per token."""

FOLLOWING_WEIGHTS = (
    (1 - FOLLOWING_DECAY) * FOLLOWING_DECAY ** np.arange(NUM_FOLLOWING, dtype=np.float64)
).astype(np.float32)


def find_match(tokens: Ints, newest: int, *, first: int = 0) -> tuple[int, int]:
    """Returns where the text that ends at `newest` ended before, and how many tokens are equal.

    The last such place is taken. (-1, 0): there is none from `first` on.
    """
    for length in MATCHED:
        start = first + length - 1
        if newest <= start:
            continue
        is_equal = tokens[start:newest] == tokens[newest]
        for back in range(1, length):
            is_equal &= tokens[start - back : newest - back] == tokens[newest - back]
        places = np.flatnonzero(is_equal)
        if len(places):
            return start + int(places[-1]), length
    return -1, 0


def flag_match(length: int) -> list[float]:
    """Returns, for each of `MATCHED`, 1 if at least that many tokens are equal."""
    return [float(length >= one) for one in MATCHED]


class RoutingHistory:
    """Tokens of a stream with the experts that each layer chose for them.

    Memory: `2 WINDOW (8 + 2 L K)` bytes, .8 MB with 12 layers and 4 experts a token.
    """

    def __init__(self, spec: ModelSpec):
        self._num_experts = spec.num_experts
        self._tokens = np.zeros(2 * WINDOW, np.int64)
        shape = (spec.num_layers, 2 * WINDOW, spec.top_k)
        self._experts_LWK = np.full(shape, spec.num_experts, np.uint16)
        self._first, self._end = 0, 0
        """Rows of the present step."""
        self.match, self.matched_tokens = -1, 0
        """Row where the text that ends with the present step ended before, and its length."""

    def append(self, tokens_T: Ints) -> None:
        """Begins a step with these tokens; of more than `WINDOW`, the last."""
        tokens_T = tokens_T[-WINDOW:]
        if self._end + len(tokens_T) > len(self._tokens):
            kept = slice(self._end - WINDOW, self._end)
            self._tokens[:WINDOW] = self._tokens[kept]
            self._experts_LWK[:, :WINDOW] = self._experts_LWK[:, kept]
            self._end = WINDOW
        self._first, self._end = self._end, self._end + len(tokens_T)
        self._tokens[self._first : self._end] = tokens_T
        newest = self._end - 1
        oldest = max(0, newest - WINDOW)
        self.match, self.matched_tokens = find_match(self._tokens, newest, first=oldest)

    def set_experts(self, layer: int, experts_TK: Ints) -> None:
        """Records the routing of the present step's tokens; the id E stands for no choice."""
        self._experts_LWK[layer, self._first : self._end] = experts_TK[-WINDOW:]

    def uses_behind(self, layer: int) -> Floats:
        """Returns `[E]`: the decayed use of each expert by the tokens behind the match."""
        if self.match < 0:
            return np.zeros(self._num_experts, np.float32)
        start = self.match + 1
        experts_XK = self._experts_LWK[layer, start : min(start + NUM_FOLLOWING, self._end)]
        weights_X = FOLLOWING_WEIGHTS[: len(experts_XK)].repeat(experts_XK.shape[1])
        use_E = np.bincount(experts_XK.ravel(), weights_X, minlength=self._num_experts + 1)
        return use_E[: self._num_experts].astype(np.float32)
