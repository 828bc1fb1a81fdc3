"""Attention of one token in float32, where PyTorch's in bfloat16 is slow.

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

NAME = "sdpa"
MARK = "moecast_decode_attention"
"""Attribute of attention modules whose single tokens are computed in float32."""


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Return what Transformers' `sdpa` returns, `[B, T, H, D]` of a query `[B, H, T, D]`."""
    if query.shape[2] != 1 or not getattr(module, MARK, False):
        return sdpa_attention_forward(module, query, key, value, *args, **kwargs)
    output, weights = sdpa_attention_forward(
        module,
        query.float(),
        key.float(),
        value.float(),
        *map(_to_float32, args),
        **{name: _to_float32(value) for name, value in kwargs.items()},
    )
    return output.to(query.dtype), weights


def _to_float32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


def attend_in_float32(model: PreTrainedModel) -> None:
    """Compute the attention of the model's single tokens in float32, where it has `sdpa`."""
    ALL_ATTENTION_FUNCTIONS[NAME] = attend
    for module in model.modules():
        setattr(module, MARK, True)
