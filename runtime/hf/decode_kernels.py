"""Kernels of steps of one token in bfloat16 and float16 on a CPU.

PyTorch hands matrix products in these dtypes to oneDNN. On CPUs without instructions for bfloat16
oneDNN takes about twice as long for a single row as PyTorch's own kernel, which reads each weight
once; with AVX-512's instructions for it they take the same time for small matrices, and PyTorch's
kernel two thirds of the time for large ones. Attention is slower still
(`runtime.hf.decode_attention`). The last bits differ, so that a reference has to be computed alike,
and every process of a machine has to come to the same decision: it is measured only where the
result is not known.

The switch for oneDNN belongs to the process: other threads that compute in these dtypes during such
a step are subject to it, too.
"""

import time
from functools import cache, partial

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from runtime.config import DecodeKernels
from runtime.hf.decode_attention import attend_in_float32
from runtime.hf.forward_pass import ForwardWrapper, find_generating_parts
from runtime.hf.inputs import find_tokens

DTYPES = (torch.bfloat16, torch.float16)
ROWS, COLUMNS, MATRICES = 768, 2048, 4
"""The matrices that are measured: together larger than a core's own cache."""
REPETITIONS = 20
"""The least of this many times hardly depends on other load."""
LEAST_RATIO = 1.5
"""Speed without oneDNN over that with it, from which on it is left out. Ratios of 1 and of 2 were
found, and none between."""


def choose_kernels(wanted: DecodeKernels, dtype: torch.dtype) -> DecodeKernels:
    """Return the kernels that `auto` stands for on this machine; others stay as they are."""
    if wanted is not DecodeKernels.AUTO:
        return wanted
    if dtype is torch.bfloat16 and not torch.cpu._is_amx_tile_supported():
        return DecodeKernels.OWN
    is_faster = dtype in DTYPES and measure_ratio(dtype, torch.get_num_threads()) >= LEAST_RATIO
    return DecodeKernels.OWN if is_faster else DecodeKernels.LIBRARY


def apply_kernels(model: PreTrainedModel, wanted: DecodeKernels) -> None:
    """Let the model's steps of one token on a CPU use the wanted kernels."""
    if model.device.type != "cpu" or model.dtype not in DTYPES:
        return
    if choose_kernels(wanted, model.dtype) is DecodeKernels.OWN:
        usual = torch.backends.mkldnn.enabled
        for part in find_generating_parts(model):
            ForwardWrapper(part, partial(_begin, usual), partial(set_onednn, usual))
        attend_in_float32(model)


def _begin(usual: bool, args: tuple, kwargs: dict) -> None:
    set_onednn(usual and find_tokens(args, kwargs).numel() > 1)


def set_onednn(is_enabled: bool) -> bool:
    """Set PyTorch's switch for oneDNN; returns what it was."""
    before: bool = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = is_enabled
    return before


@cache
@torch.no_grad()
def measure_ratio(dtype: torch.dtype, num_threads: int) -> float:
    """Return the time of one row's product with oneDNN over the time without.

    Args:
        num_threads: PyTorch's; a part of the key, as the ratio depends on it.
    """
    assert num_threads == torch.get_num_threads()
    row = torch.ones(1, COLUMNS, dtype=dtype)
    matrices = [torch.ones(ROWS, COLUMNS, dtype=dtype) for _ in range(MATRICES)]

    def seconds(is_enabled: bool) -> float:
        usual = set_onednn(is_enabled)
        try:
            start = time.perf_counter()
            for matrix in matrices:
                F.linear(row, matrix)
            return time.perf_counter() - start
        finally:
            set_onednn(usual)

    pairs = [(seconds(True), seconds(False)) for _ in range(REPETITIONS)]
    with_onednn, without = (min(times) for times in zip(*pairs, strict=True))
    return with_onednn / without
