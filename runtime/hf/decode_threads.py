"""The number of threads that compute a step of one token.

Such a step is many small products. Another thread has to be woken for each, which takes as long as
a product of a small expert: with experts in 4 bits one thread was twice as fast as two. One
processor is left to the reads and forecasts that go on meanwhile: on two processors, a second
thread made a step a sixth faster with all experts resident and 5 to 10 % slower while experts were
read.
Prompts and batches are computed with all threads.

Attention divides a sequence by threads, so the number changes the last bits: a reference has to be
computed with the same.
"""

import time
from functools import cache

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from runtime.hf.forward_pass import ForwardWrapper, find_generating_parts
from runtime.hf.inputs import find_tokens

PRODUCTS = 3
"""Products of an expert with one token."""
MAX_MATRIX_BYTES = 16 << 20
"""A part of a larger matrix is measured: that needs every thread."""
NUM_MATRICES = 6
REPETITIONS = 7
LEAST_RATIO = 1.25
"""Speed with many threads over that with one, from which on many are used: above noise, so that
every process on a machine comes to the same decision."""


class DecodeThreads:
    """Computes a model's steps of one token with `number` threads."""

    def __init__(self, model: PreTrainedModel, number: int):
        self._number = number
        self._usual = torch.get_num_threads()
        for part in find_generating_parts(model):
            ForwardWrapper(part, self._begin, self._end)

    def _begin(self, args: tuple, kwargs: dict) -> None:
        self._usual = torch.get_num_threads()
        if find_tokens(args, kwargs).numel() == 1 and self._usual != self._number:
            torch.set_num_threads(self._number)

    def _end(self) -> None:
        if torch.get_num_threads() != self._usual:
            torch.set_num_threads(self._usual)


def apply_decode_threads(model: PreTrainedModel, wanted: int | None, *, expert_bytes: int) -> None:
    """Let the model compute steps of one token with the wanted number of threads.

    Does nothing for a model that is not on a CPU.

    Args:
        wanted: None: one, or one less than usual, whichever is faster on this machine.
        expert_bytes: size of an expert as it is computed.
    """
    if model.device.type != "cpu":
        return
    model.moecast_decode_threads = wanted or choose_decode_threads(model, expert_bytes)
    DecodeThreads(model, model.moecast_decode_threads)


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
    is_faster = measure_ratio(num_rows, width, model.dtype, many) >= LEAST_RATIO
    return many if is_faster else 1


@cache
@torch.no_grad()
def measure_ratio(num_rows: int, num_columns: int, dtype: torch.dtype, num_threads: int) -> float:
    """Return the time of one row's products with one thread over the time with `num_threads`."""
    row = torch.ones(1, num_columns, dtype=dtype)
    matrices = [torch.ones(num_rows, num_columns, dtype=dtype) for _ in range(NUM_MATRICES)]

    usual = torch.get_num_threads()

    def seconds(number: int) -> float:
        torch.set_num_threads(number)
        start = time.perf_counter()
        for matrix in matrices:
            F.linear(row, matrix)
        return time.perf_counter() - start

    try:
        pairs = [(seconds(1), seconds(num_threads)) for _ in range(REPETITIONS)]
    finally:
        torch.set_num_threads(usual)
    with_one, with_many = (min(times) for times in zip(*pairs, strict=True))
    return with_one / with_many
