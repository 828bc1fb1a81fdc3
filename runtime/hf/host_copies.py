"""Copies of a device's tensors in host memory: several by one copy, and none of a choice twice.

For each copy to the host, the host waits until the device has computed all that was issued.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

KNOWN = "moecast_copy"
"""Attribute of tensors whose copy in host memory is kept."""


class KnownCopy(NamedTuple):
    """A tensor in host memory, and the version of what it is a copy of."""

    tensor: Tensor
    version: int


def copy_together(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return tensors of one device in host memory, by one copy; None stays None."""
    given = [tensor for tensor in tensors if tensor is not None]
    if len(given) == 1:
        return [None if tensor is None else tensor.cpu() for tensor in tensors]
    # The widest numbers first: every part begins at a multiple of its own.
    given.sort(key=lambda tensor: -tensor.itemsize)
    parts = [tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in given]
    copied = torch.cat(parts).cpu().split([len(part) for part in parts])
    found = {
        id(tensor): part.view(tensor.dtype).view(tensor.shape)
        for tensor, part in zip(given, copied, strict=True)
    }
    return [None if tensor is None else found[id(tensor)] for tensor in tensors]


def keep_copy(tensor: Tensor, copied: Tensor) -> None:
    """Let `host_copy` return this copy of a tensor of a device, until the tensor is changed."""
    if not tensor.is_inference():  # those have no version
        setattr(tensor, KNOWN, KnownCopy(copied, tensor._version))


def host_copy(tensor: Tensor) -> Tensor:
    """Return a tensor in host memory: the copy that is kept of it, or a new one."""
    if tensor.is_cpu:
        return tensor
    known: KnownCopy | None = getattr(tensor, KNOWN, None)
    if known is not None and known.version == tensor._version:
        return known.tensor
    return tensor.cpu()
