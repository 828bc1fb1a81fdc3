"""Inputs of a model's forward pass: its tokens, and whether they continue a sequence."""

import weakref
from typing import Any

import torch
from torch import Tensor

from runtime.errors import CheckpointError

NO_TOKEN = -1
"""Stands for a position that was given as an embedding."""


def find_tokens(args: tuple, kwargs: dict[str, Any]) -> Tensor:
    """Token ids `(batch, sequence)`, integers; `NO_TOKEN` everywhere for `inputs_embeds`.

    Raises:
        CheckpointError: neither ids nor embeddings.
    """
    given = {"input_ids": args[0], **kwargs} if args else kwargs
    # A diffusion model's step is given the canvas alone, which it calls its decoder's.
    for prefix in ("", "decoder_"):
        if (tokens := given.get(f"{prefix}input_ids")) is not None:
            return tokens
        if (embeddings := given.get(f"{prefix}inputs_embeds")) is not None:
            return torch.full(embeddings.shape[:2], NO_TOKEN, dtype=torch.int64)
    raise CheckpointError("moecast serves models that are given input_ids or inputs_embeds")


class CacheHistory:
    """Distinguishes steps that continue requests from steps that begin new ones."""

    def __init__(self) -> None:
        self._seen: weakref.ref | None = None
        """The cache of the step before, where caches do not count their tokens."""

    def continues(self, cache: Any) -> bool:
        """Return whether the step's cache holds tokens.

        Caches of recurrent layers alone do not count tokens: such a step continues if the previous
        step had the same cache.
        """
        if cache is None:
            return False
        try:
            return int(cache.get_seq_length()) > 0
        except (AttributeError, TypeError, ValueError):
            known = self._seen is not None and self._seen() is cache
            self._seen = weakref.ref(cache) if hasattr(cache, "__weakref__") else None
            return known
