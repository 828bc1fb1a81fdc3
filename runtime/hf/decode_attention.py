"""Attention of one token: in float32, where PyTorch's in bfloat16 is slow, and in blocks of rows.

On CPUs without instructions for bfloat16, PyTorch's attention takes 6 to 10 times as long for one
token in bfloat16 as in float32, conversion included: 8 ms instead of 1 for a layer of 32 heads and
1,024 tokens. The result is rounded to the model's dtype once, so it is the more exact of the two.

Transformers looks attention functions up by name, for all models of the process. The one that
stands here for `sdpa` does what the library's does for modules that are not marked.
"""

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from runtime.hf.row_block import SequenceStates, attend_by_sequence

NAME = "sdpa"
MARK = "moecast_decode_attention"
"""Attribute of attention modules whose single tokens are computed in float32."""


def attend(
    module: nn.Module,
    query: Tensor,
    key: Any,
    value: Any,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return what Transformers' `sdpa` returns, `[B, T, H, D]` of a query `[B, H, T, D]`."""
    if isinstance(key, SequenceStates):
        if attention_mask is not None:
            raise TypeError("a block of sequences takes no mask")
        return attend_by_sequence(
            lambda *states: attend(module, *states, **kwargs), query, key, value
        )
    if query.shape[2] != 1 or not getattr(module, MARK, False):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    output, weights = sdpa_attention_forward(
        module,
        query.float(),
        key.float(),
        value.float(),
        _to_float32(attention_mask),
        **{name: _to_float32(value) for name, value in kwargs.items()},
    )
    return output.to(query.dtype), weights


def _to_float32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


def register_attention() -> None:
    """Let models with `sdpa` attend as here; registering again changes nothing."""
    ALL_ATTENTION_FUNCTIONS[NAME] = attend


def attend_in_float32(model: PreTrainedModel) -> None:
    """Compute the attention of the model's single tokens in float32, where it has `sdpa`."""
    register_attention()
    for module in model.modules():
        setattr(module, MARK, True)
