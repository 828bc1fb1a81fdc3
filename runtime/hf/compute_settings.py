"""Settings of the process that a forward pass may change while it runs."""

from typing import NamedTuple

import torch

from runtime.hf.decode_kernels import set_onednn


class ComputeSettings(NamedTuple):
    """PyTorch's switch for oneDNN and its number of threads."""

    onednn: bool
    threads: int


def read_settings() -> ComputeSettings:
    return ComputeSettings(torch.backends.mkldnn.enabled, torch.get_num_threads())


def change_settings(settings: ComputeSettings) -> ComputeSettings:
    """Put settings in force; returns those before."""
    before = read_settings()
    set_onednn(settings.onednn)
    if settings.threads != before.threads:
        torch.set_num_threads(settings.threads)
    return before
