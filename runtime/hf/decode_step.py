"""Steps of one token on a CPU: kernels, threads and attention of its own.

Kernels: PyTorch hands matrix products in bfloat16 and float16 to oneDNN. On CPUs without
instructions for bfloat16 oneDNN takes about twice as long for a single row as PyTorch's own kernel,
which reads each weight once; with AVX-512's instructions for it they take the same time for small
matrices, and PyTorch's kernel two thirds of the time for large ones; with AMX it takes .8 to 1.5
times as long. The kernel of `runtime.hf.linear` with the same bits takes half of oneDNN's time
there for matrices of experts, .9 for larger ones, and 1.1 at worst. The switch for oneDNN belongs
to the process: other threads that compute in these dtypes meanwhile are subject to it, too.

Attention: on CPUs without instructions for bfloat16, PyTorch's takes 6 to 10 times as long for one
token in bfloat16 as in float32, conversion included: 8 ms instead of 1 for a layer of 32 heads and
1,024 tokens. Our kernel (`attention.h`) computes in float32 without a conversion; where there is
none, PyTorch's does with it. The result is rounded to the model's dtype once, so it is the more
exact. Heads that share keys and values are computed together, which takes a third of the time.
Transformers looks attention functions up by name, for all models of the process. The one that
stands here for `sdpa` does what the library's does for modules that are not marked.

Threads: such a step is many small products. Another thread has to be woken for each, which takes as
long as a product of a small expert: with experts in 4 bits one thread was twice as fast as two. One
processor is left to the reads and forecasts that go on meanwhile: on two processors, a second
thread made a step a sixth faster with all experts resident and 5 to 10 % slower while experts were
read. Prompts and batches are computed with all threads. Products of quantised rows, and of bfloat16
with PyTorch's bits (`runtime.hf.linear`), have threads of their own, which take what is there
to be done without anybody waiting for them, and whose number changes no bit: these are as many as
for prompts, while PyTorch's, which would keep a processor busy between two products, are left out.

All three change the last bits (attention divides a sequence by threads), so that a reference has to
be computed alike, and every process of a machine has to come to the same decision: it is measured
only where the result is not known.
"""

import time
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from runtime.config import DecodeKernels
from runtime.hf.forward_pass import find_generating_parts, find_tokens, surround_forward
from runtime.hf.row_block import SequenceStates, attend_by_sequence
from runtime.store.ggml.matrix import count_threads, own_threads

try:
    from runtime.store.ggml.products import attend as attend_token
except ImportError:  # installed without compiled code, or with that of an earlier version
    attend_token = None  # type: ignore[assignment]

DTYPES = (torch.bfloat16, torch.float16)
ROWS, COLUMNS, MATRICES = 768, 2048, 4
"""The matrices that are measured: together larger than a core's own cache."""
KERNEL_REPETITIONS = 20
"""The least of this many times hardly depends on other load."""
LEAST_KERNEL_SPEEDUP = 1.5
"""Speed without oneDNN over that with it, from which on it is left out. Ratios of 1 and of 2 were
found, and none between."""

PRODUCTS = 3
"""Products of an expert with one token."""
MAX_MATRIX_BYTES = 16 << 20
"""A part of a larger matrix is measured: that needs every thread."""
NUM_MATRICES = 6
THREAD_REPETITIONS = 7
LEAST_THREAD_SPEEDUP = 1.25
"""Speed with many threads over that with one, from which on many are used: above noise, so that
every process on a machine comes to the same decision."""

ATTENTION = "sdpa"
MARK = "moecast_decode_attention"
"""Attribute of attention modules whose single tokens are computed in float32."""


class ComputeSettings(NamedTuple):
    """Settings of the process that a forward pass may change while it runs."""

    onednn: bool
    """PyTorch's switch for oneDNN."""
    threads: int
    """PyTorch's."""
    own_threads: int
    """Those of moecast's own kernels; 0: as many as PyTorch's."""


def read_settings() -> ComputeSettings:
    return ComputeSettings(
        torch.backends.mkldnn.enabled, torch.get_num_threads(), own_threads.get()
    )


def change_settings(settings: ComputeSettings) -> ComputeSettings:
    """Put settings in force; returns those before."""
    before = read_settings()
    torch.backends.mkldnn.enabled = settings.onednn
    own_threads.set(settings.own_threads)
    if settings.threads != before.threads:
        torch.set_num_threads(settings.threads)
    return before


def apply_to_decode(model: PreTrainedModel, **own: Any) -> None:
    """Let the model compute steps of one token with these settings; others stay as usual."""
    usual = read_settings()

    def begin(args: tuple, kwargs: dict) -> None:
        nonlocal usual
        usual = read_settings()
        if find_tokens(args, kwargs).numel() == 1:
            change_settings(usual._replace(**own))

    for part in find_generating_parts(model):
        surround_forward(part, begin, lambda: change_settings(usual))


def choose_kernels(wanted: DecodeKernels, dtype: torch.dtype) -> DecodeKernels:
    """Return the kernels that `auto` stands for on this machine; others stay as they are."""
    if wanted is not DecodeKernels.AUTO:
        return wanted
    if dtype is torch.bfloat16:
        return DecodeKernels.OWN
    is_faster = (
        dtype in DTYPES
        and measure_kernel_speedup(dtype, torch.get_num_threads()) >= LEAST_KERNEL_SPEEDUP
    )
    return DecodeKernels.OWN if is_faster else DecodeKernels.LIBRARY


def apply_kernels(model: PreTrainedModel, wanted: DecodeKernels) -> None:
    """Let the model's steps of one token on a CPU use the wanted kernels."""
    if model.device.type != "cpu" or model.dtype not in DTYPES:
        return
    if choose_kernels(wanted, model.dtype) is DecodeKernels.OWN:
        apply_to_decode(model, onednn=False)
        attend_in_float32(model)


@cache
@torch.no_grad()
def measure_kernel_speedup(dtype: torch.dtype, num_threads: int) -> float:
    """Return the time of one row's product with oneDNN over the time without.

    Args:
        num_threads: PyTorch's; a part of the key, as the ratio depends on it.
    """
    assert num_threads == torch.get_num_threads()
    matrices = [torch.ones(ROWS, COLUMNS, dtype=dtype) for _ in range(MATRICES)]
    ways = [read_settings()._replace(onednn=is_enabled) for is_enabled in (True, False)]
    return measure_speedup(matrices, *ways, repetitions=KERNEL_REPETITIONS)


def measure_speedup(
    matrices: Sequence[Tensor], usual: ComputeSettings, other: ComputeSettings, *, repetitions: int
) -> float:
    """Return the least time of one row's products with one setting over that with another.

    The two are tried in turns.
    """
    row, before = torch.ones_like(matrices[0][:1]), read_settings()

    def seconds(settings: ComputeSettings) -> float:
        start = time.perf_counter()
        change_settings(settings)
        for matrix in matrices:
            F.linear(row, matrix)
        return time.perf_counter() - start

    try:
        pairs = [(seconds(usual), seconds(other)) for _ in range(repetitions)]
    finally:
        change_settings(before)
    least_usual, least_other = map(min, zip(*pairs, strict=True))
    return least_usual / least_other


def apply_decode_threads(model: PreTrainedModel, wanted: int | None, *, expert_bytes: int) -> None:
    """Let the model compute steps of one token with the wanted number of threads.

    Does nothing for a model that is not on a CPU.

    Args:
        wanted: None: one, or one less than usual, whichever is faster on this machine, and as many
            as usual for moecast's own kernels.
        expert_bytes: size of an expert as it is computed.
    """
    if model.device.type != "cpu":
        return
    model.moecast_decode_threads = wanted or choose_decode_threads(model, expert_bytes)
    apply_to_decode(
        model, threads=model.moecast_decode_threads, own_threads=wanted or torch.get_num_threads()
    )


def read_decode_threads(model: PreTrainedModel) -> int | None:
    """Return the number that was applied to a model; None: none was."""
    return getattr(model, "moecast_decode_threads", None)


def choose_decode_threads(model: PreTrainedModel, expert_bytes: int) -> int:
    """Return one or one less than PyTorch's number of threads: what multiplies one token faster."""
    many = torch.get_num_threads() - 1
    if many <= 1:
        return 1
    width = model.config.get_text_config().hidden_size
    size = min(expert_bytes // PRODUCTS, MAX_MATRIX_BYTES)
    num_rows = max(1, size // (width * model.dtype.itemsize))
    speedup = measure_thread_speedup(num_rows, width, model.dtype, many)
    return many if speedup >= LEAST_THREAD_SPEEDUP else 1


@cache
@torch.no_grad()
def measure_thread_speedup(
    num_rows: int, num_columns: int, dtype: torch.dtype, num_threads: int
) -> float:
    """Return the time of one row's products with one thread over the time with `num_threads`."""
    matrices = [torch.ones(num_rows, num_columns, dtype=dtype) for _ in range(NUM_MATRICES)]
    ways = [read_settings()._replace(threads=threads) for threads in (1, num_threads)]
    return measure_speedup(matrices, *ways, repetitions=THREAD_REPETITIONS)


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
    if attention_mask is None and (own := _attend_own(query, key, value, **kwargs)) is not None:
        return own, None
    if attention_mask is None and getattr(module, "num_key_value_groups", 1) > 1:
        # With a mask, the library computes the heads that share keys and values together.
        attention_mask = torch.zeros(1, 1, 1, key.shape[2], device=key.device)
    output, weights = sdpa_attention_forward(
        module,
        query.float(),
        key.float(),
        value.float(),
        _to_float32(attention_mask),
        **{name: _to_float32(value) for name, value in kwargs.items()},
    )
    return output.to(query.dtype), weights


UNUSUAL = ("position_bias", "cache", "softcap")
"""Options of attention functions that change what is computed."""


def _attend_own(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None = None, **kwargs: Any
) -> Tensor | None:
    """Compute with the kernel that reads keys and values where they lie, in float32, too.

    A row's bits depend on that row alone. None: there is no kernel, and PyTorch has to compute.
    """
    (num_rows, num_heads, _, width), dtype = query.shape, query.dtype
    if (
        attend_token is None
        or type(query) is not Tensor
        or dtype is not torch.bfloat16
        or not (query.is_contiguous() and query.is_cpu and key.is_cpu and value.is_cpu)
        or not (key.dtype is dtype and value.dtype is dtype)
        or not (key.stride(3) == 1 and value.stride(3) == 1)
        or not (key.shape[:3] == value.shape[:3] and len(key) == num_rows and key.shape[3] == width)
        or kwargs.get("dropout")
        or any(kwargs.get(name) is not None for name in UNUSUAL)
        or torch.is_grad_enabled()
    ):
        return None
    output = query.new_empty(num_rows, 1, num_heads, value.shape[3])
    for row in range(num_rows):
        is_done = attend_token(
            query[row].data_ptr(),
            num_heads,
            width,
            key[row].data_ptr(),
            key.shape[1],
            key.shape[2],
            key.stride(1),
            key.stride(2),
            value[row].data_ptr(),
            value.shape[3],
            value.stride(1),
            value.stride(2),
            width**-0.5 if scaling is None else scaling,
            output[row].data_ptr(),
            count_threads(),
        )
        if not is_done:
            return None
    return output


def _to_float32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


def register_attention() -> None:
    """Let models with `sdpa` attend as here; registering again changes nothing."""
    ALL_ATTENTION_FUNCTIONS[ATTENTION] = attend


def attend_in_float32(model: PreTrainedModel) -> None:
    """Compute the attention of the model's single tokens in float32, where it has `sdpa`."""
    register_attention()
    for module in model.modules():
        setattr(module, MARK, True)
