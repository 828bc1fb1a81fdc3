"""Greedy generation of exactly as many tokens as are wanted."""

import torch
from torch import Tensor


@torch.inference_mode()
def generate_greedy(model: torch.nn.Module, prompts: Tensor, new_tokens: int) -> Tensor:
    """Returns the `[B, new_tokens]` tokens that follow prompts `[B, T]` of one length."""
    output = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
    )
    return output[:, prompts.shape[1] :]
