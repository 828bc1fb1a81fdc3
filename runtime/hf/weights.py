"""Weights in memory of our own, not in a memory-mapped file."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

ALIGNMENT = 64
"""Bytes. What PyTorch's own allocations on the CPU are aligned to."""


@torch.no_grad()
def unmap_weights(model: PreTrainedModel, *, mapped: bool = True) -> PreTrainedModel:
    """Copies every parameter out of the file that it may be mapped from; returns the model.

    A mapped page that cannot be read kills the process, and kernels take another path on a mapped
    tensor's unaligned address, which changes the last bits of a result. Parameters that share
    memory still do afterwards.

    Args:
        mapped: False where no file was mapped: then only what is unaligned is copied.
    """
    copies: dict[int, Tensor] = {}
    for parameter in model.parameters():
        address = parameter.data_ptr()
        if address not in copies:
            # On a device nothing is mapped, and a copy would double its memory.
            foreign = parameter.device.type == "cpu" and (mapped or address % ALIGNMENT)
            copies[address] = parameter.data.clone() if foreign else parameter.data
        parameter.data = copies[address]
    return model
