"""`python -m benchmarks dequantise`: the time of dequantising one expert, ours over Transformers'.

Both take turns on the same random bytes, in the shapes of published models.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from benchmarks.config import DequantiseConfig
from benchmarks.reports import describe_machine, print_line, write_report
from runtime.store.conversion import dequantise_fp8, dequantise_mxfp4

DTYPE = torch.bfloat16
GROUP_BYTES, GROUP = 16, 32
"""MXFP4: bytes and numbers with one scale."""
BLOCK = 128
"""FP8: rows and columns with one scale."""
GPT_OSS_20B = ((5760, 2880), (2880, 2880))
"""Rows and columns of an expert's matrices as they are stored."""
DEEPSEEK_V3 = ((2048, 7168), (2048, 7168), (7168, 2048))


@dataclass(frozen=True, kw_only=True)
class DequantiseRow:
    """One expert."""

    format: str
    ours_seconds: float
    library_seconds: float
    product_seconds: float
    """Time of one token's products with the dequantised matrices."""
    speed: float
    """Median over the rounds of the library's time over ours."""


def make_mxfp4(rows: int, columns: int) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """Return what dequantises a random matrix: our function and the library's."""
    groups = columns // GROUP
    blocks = torch.randint(256, (rows, groups, GROUP_BYTES), dtype=torch.uint8)
    scales = torch.randint(110, 130, (rows, groups), dtype=torch.uint8)
    return (
        lambda: dequantise_mxfp4(blocks, scales, DTYPE),
        lambda: convert_moe_packed_tensors(blocks[None], scales[None], dtype=DTYPE)[0],
    )


def make_fp8(rows: int, columns: int) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """Return what dequantises a random matrix: our function and the library's."""
    weight = torch.randn(rows, columns).to(torch.float8_e4m3fn)
    scales = torch.rand(rows // BLOCK, columns // BLOCK)
    library = Fp8Dequantize(None)

    def ours() -> Tensor:
        result = torch.empty(rows, columns, dtype=DTYPE)
        dequantise_fp8(weight, scales, result)
        return result

    return ours, lambda: library._dequantize_one(weight, scales, DTYPE)


EXPERTS = {
    "MXFP4, an expert of gpt-oss-20b": (make_mxfp4, GPT_OSS_20B),
    "FP8, an expert of DeepSeek-V3": (make_fp8, DEEPSEEK_V3),
}


def run_dequantise(config: DequantiseConfig) -> None:
    """Measure every format; refuses results that differ in a bit."""
    machine = describe_machine(config.threads)
    torch.set_num_threads(config.threads)
    rows = []
    for name, (make, shapes) in EXPERTS.items():
        pairs = [make(*shape) for shape in shapes]
        matrices = [ours() for ours, _ in pairs]
        assert all(map(torch.equal, matrices, (library() for _, library in pairs)))
        products = [make_product(matrix) for matrix in matrices]
        rounds = [
            (
                seconds([ours for ours, _ in pairs]),
                seconds([library for _, library in pairs]),
                seconds(products),
            )
            for _ in range(config.repetitions)
        ]
        times = [statistics.median(column) for column in zip(*rounds, strict=True)]
        rows.append(
            DequantiseRow(
                format=name,
                ours_seconds=times[0],
                library_seconds=times[1],
                product_seconds=times[2],
                speed=statistics.median(library / ours for ours, library, _ in rounds),
            )
        )
        print_line(str(rows[-1]))
    write_report(config, machine=machine, rows=rows)


def make_product(matrix: Tensor) -> Callable[[], Tensor]:
    token = torch.randn(1, matrix.shape[1], dtype=DTYPE)
    return lambda: F.linear(token, matrix)


def seconds(calls: list[Callable[[], Tensor]]) -> float:
    start = time.perf_counter()
    for call in calls:
        call()
    return time.perf_counter() - start
