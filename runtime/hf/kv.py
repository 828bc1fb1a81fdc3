"""Size of a model's KV cache, measured as architectures differ, or estimated, and its budget."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedConfig, PreTrainedModel

from runtime.errors import BudgetError

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


@dataclass(frozen=True)
class KVCacheBudget:
    """Memory for the KV caches of all running answers.

    An answer starts when its prompt and all tokens that it may generate fit, so that no running
    one ever has to be preempted.

    Raises:
        BudgetError: the cache's size cannot be measured, or two tokens do not fit.
    """

    size: CacheSize
    budget_bytes: int

    def __post_init__(self) -> None:
        if self.size.of(1) == 0:
            raise BudgetError(
                "kv_budget: the size of this model's KV cache cannot be measured; leave it out"
            )
        if self.max_length is not None and self.max_length < 2:
            raise BudgetError(
                f"kv_budget={self.budget_bytes}: the KV cache of two tokens takes "
                f"{self.size.of(2)} bytes; raise it, or leave it out"
            )

    @property
    def max_length(self) -> int | None:
        """Most tokens of prompt and answer that fit alone; None: any number."""
        if self.size.bytes_per_token == 0:
            return None
        return (self.budget_bytes - self.size.bytes_fixed) // self.size.bytes_per_token

    def bytes_of(self, lengths: Iterable[int]) -> int:
        """Bytes of the KV caches of sequences with these lengths."""
        return sum(map(self.size.of, lengths))

    def count_left(self, lengths: Iterable[int]) -> int:
        """Bytes that the KV caches of sequences with these lengths leave."""
        return self.budget_bytes - self.bytes_of(lengths)

    def fits(self, lengths: Iterable[int]) -> bool:
        """Whether the KV caches of all these sequences fit at once."""
        return self.count_left(lengths) >= 0


@torch.no_grad()
def measure_cache_size(model: PreTrainedModel) -> CacheSize:
    """Measure the KV cache of one row with a few tokens; estimate it if there is an encoder.

    Raises:
        TransferError: experts of a served model cannot be read.
    """
    if model.config.is_encoder_decoder:
        # What is kept of a prompt does not grow with the answer.
        return CacheSize(estimate_cache_bytes(model.config, 1, model.dtype), 0)
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
    return count_layer_bytes(getattr(cache, "layers", ()))


def count_layer_bytes(layers: Iterable[Any]) -> int:
    leaves = tree_leaves([vars(layer) for layer in layers])
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def estimate_cache_bytes(config: PreTrainedConfig, num_tokens: int, dtype: torch.dtype) -> int:
    """Estimate one row's KV cache from the configuration, before the model can be run.

    Every layer counts as one of full attention, so layers with a window or a state take less.
    """
    text: Any = config.get_text_config()
    heads = _largest(text, "num_attention_heads") or 1
    rotary, latent = _largest(text, "qk_rope_head_dim"), _largest(text, "kv_lora_rank")
    if latent:
        # Multi-head latent attention caches one vector for all heads (DeepSeek-V2, section 2.1).
        width = latent + rotary
    else:
        key = _largest(text, "head_dim") or text.hidden_size // heads
        value = _largest(text, "v_head_dim") or key
        width = (_largest(text, "num_key_value_heads") or heads) * (key + value)
    # Sparse attention caches one more key, by which it chooses tokens.
    width += _largest(text, "index_head_dim")
    # A decoder with an encoder keeps the encoder's keys and values too.
    num_layers = text.num_hidden_layers * (2 if config.is_encoder_decoder else 1)
    return num_layers * width * num_tokens * dtype.itemsize


def _largest(config: Any, name: str) -> int:
    """Returns a number of the configuration, the largest where layers differ; 0 for none."""
    value = getattr(config, name, None)
    return max(value) if isinstance(value, (list, tuple)) else int(value or 0)
