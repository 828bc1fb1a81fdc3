"""Finds the precision in which a model's own loop adds up its experts' outputs.

Most accumulate in the hidden states' dtype, some in that of the routing weights, some in float32,
and a few compute differently. The module's loop and ours run on a tiny bank of random experts, and
their bits are compared.
"""

import copy
from enum import StrEnum

import torch
from torch import Tensor, nn

EXPERTS, TOKENS, TOP_K, WIDTH, HIDDEN = 4, 24, 3, 4, 8
"""The tiny bank: every expert gets several tokens, every token several experts."""


class AccumulationDtype(StrEnum):
    """Dtype of the sum over a token's experts."""

    HIDDEN = "of the hidden states"
    WEIGHTS = "of the routing weights"
    FLOAT32 = "float32"

    def dtype(self, hidden: Tensor, weights: Tensor) -> torch.dtype:
        """Return the dtype to accumulate these two tensors' product in."""
        if self is AccumulationDtype.HIDDEN:
            return hidden.dtype
        return weights.dtype if self is AccumulationDtype.WEIGHTS else torch.float32


def run_own_loop(module: nn.Module, *args: Tensor) -> Tensor:
    """The experts class's own forward, under Transformers' decorator."""
    return type(module).forward.__wrapped__(module, *args)


def make_tiny_twin(
    module: nn.Module, dtype: torch.dtype
) -> tuple[nn.Module, list[dict[str, Tensor]]]:
    """A module of the same class with four small random experts, and these one by one."""
    generator = torch.Generator().manual_seed(0)
    up, up_width = ("gate_up_proj", 2 * WIDTH) if module.has_gate else ("up_proj", WIDTH)
    shapes: dict[str, tuple[int, ...]] = {up: (up_width, HIDDEN), "down_proj": (HIDDEN, WIDTH)}
    if module.is_transposed:
        shapes = {name: shape[::-1] for name, shape in shapes.items()}
    if module.has_bias:
        shapes |= {f"{up}_bias": (up_width,), "down_proj_bias": (HIDDEN,)}
    fused = {
        name: torch.randn((EXPERTS, *shape), generator=generator).to(dtype)
        for name, shape in shapes.items()
    }
    twin = copy.copy(module)
    twin._parameters = {}
    twin._modules = dict(module._modules)
    if module.has_post_expert_norm:
        twin._modules["post_expert_norm"] = nn.Identity()
    for name, value in {**fused, "num_experts": EXPERTS}.items():
        setattr(twin, name, value)
    return twin, [{name: value[e] for name, value in fused.items()} for e in range(EXPERTS)]


def make_inputs(dtype: torch.dtype, weights_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """`(hidden_TD, experts_TK, weights_TK)`; the weights add up to 1 for no token."""
    generator = torch.Generator().manual_seed(1)
    hidden_TD = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype)
    experts_TK = torch.rand(TOKENS, EXPERTS, generator=generator).argsort(-1)[:, :TOP_K]
    weights_TK = torch.rand(TOKENS, TOP_K, generator=generator).to(weights_dtype)
    return hidden_TD, experts_TK, weights_TK
