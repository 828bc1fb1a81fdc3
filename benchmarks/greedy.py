"""Greedy generation of exactly as many tokens as are wanted."""

from typing import Any

import torch
from torch import Tensor


def generate_greedy(
    model: torch.nn.Module, prompts: Tensor, new_tokens: int, *, streamer: Any = None
) -> Tensor:
    """Returns the `[B, new_tokens]` tokens that follow prompts `[B, T]` of one length."""
    output = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=0,
        streamer=streamer,
    )
    return output[:, prompts.shape[1] :]
