"""Size of a model's KV cache, measured, because architectures differ."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

PROMPT_TOKENS = 4
STEPS = 2


@dataclass(frozen=True)
class CacheSize:
    """Size of one row's KV cache."""

    bytes_per_token: int
    """Growth of all layers per token; 0 for caches that do not grow."""
    bytes_fixed: int
    """Bytes that do not depend on the length."""

    def of(self, num_tokens: int) -> int:
        """Bytes; of a layer that keeps a window only, too many once the window is full."""
        return self.bytes_fixed + num_tokens * self.bytes_per_token

    @classmethod
    def grown(
        cls, before: int, after: int, *, num_steps: int, num_rows: int, num_tokens: int
    ) -> "CacheSize":
        """Return the size, given a batch's cache bytes before and after `num_steps` decode steps.

        Args:
            num_tokens: length of each row after the steps.
        """
        per_token = max(0, after - before) // num_steps // num_rows
        # Of a window that is full already nothing grows: then all of it is fixed.
        return cls(per_token, max(0, after // num_rows - per_token * num_tokens))


@torch.no_grad()
def measure_cache_size(model: PreTrainedModel) -> CacheSize:
    """Measure the KV cache of one row with a few tokens.

    Raises:
        TransferError: experts of a served model cannot be read.
    """
    tokens_BT = torch.zeros(1, PROMPT_TOKENS, dtype=torch.int64, device=model.device)
    output: Any = model(tokens_BT, use_cache=True)
    before = count_cache_bytes(output.past_key_values)
    for _ in range(STEPS):
        output = model(tokens_BT[:, :1], past_key_values=output.past_key_values, use_cache=True)
    return CacheSize.grown(
        before,
        count_cache_bytes(output.past_key_values),
        num_steps=STEPS,
        num_rows=1,
        num_tokens=PROMPT_TOKENS + STEPS,
    )


def count_cache_bytes(cache: Any) -> int:
    leaves = tree_leaves([vars(layer) for layer in getattr(cache, "layers", ())])
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
