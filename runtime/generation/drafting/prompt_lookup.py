"""Drafts from the text itself: tokens that followed the same text before."""

from collections.abc import Callable

import numpy as np
from torch import Tensor

from predictors.routing_history import find_match


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
