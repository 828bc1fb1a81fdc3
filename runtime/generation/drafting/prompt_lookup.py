"""Drafts from the text itself: tokens that followed the same text before."""

from collections.abc import Callable

import numpy as np
from torch import Tensor

from predictors.base import Ints

MATCHED = (4, 2)
"""Numbers of tokens that have to be equal; the first that finds a place is taken."""


def find_match(tokens: Ints, newest: int) -> tuple[int, int]:
    """Return where the text that ends at `newest` ended before, and how many tokens are equal.

    The last such place is taken; (-1, 0) if there is none.
    """
    for length in MATCHED:
        start = length - 1
        if newest <= start:
            continue
        is_equal = tokens[start:newest] == tokens[newest]
        for back in range(1, length):
            is_equal &= tokens[start - back : newest - back] == tokens[newest - back]
        places = np.flatnonzero(is_equal)
        if len(places):
            return start + int(places[-1]), length
    return -1, 0


class PromptLookup:
    """Drafts tokens that followed the same text before, in the prompt or the answer."""

    def draft(self, tokens_1T: Tensor, choose: Callable[[int], int]) -> tuple[list[int], int]:
        """Return the drafted tokens, and how many tokens of the text are the same."""
        tokens = tokens_1T[0].cpu().numpy()
        place, matched = find_match(tokens, len(tokens) - 1)
        if place < 0:
            return [], matched
        return repeat(tokens, place + 1, choose(matched)), matched


def repeat(tokens: np.ndarray, start: int, count: int) -> list[int]:
    """Return `count` tokens from `start` on; a text that repeats itself goes on doing so."""
    period = len(tokens) - start
    return [int(tokens[start + i % period]) for i in range(count)]
