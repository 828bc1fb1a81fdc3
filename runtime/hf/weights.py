"""Weights in memory of our own, not in a memory-mapped file."""

import torch
from torch import Tensor
from transformers import PreTrainedModel


@torch.no_grad()
def own_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Copies every parameter out of the file that it may be mapped from; returns the model.

    A mapped page that cannot be read kills the process, and kernels take another path on a mapped
    tensor's unaligned address, which changes the last bits of a result. Parameters that share
    memory still do afterwards.
    """
    copies: dict[int, Tensor] = {}
    for parameter in model.parameters():
        address = parameter.data_ptr()
        if address not in copies:
            copies[address] = parameter.data.clone()
        parameter.data = copies[address]
    return model
