"""`python -m benchmarks kernels`: a layer's experts for one token, over the memory's bandwidth.

Experts have Qwen3-30B-A3B's shape. There are as many as a layer has, far more than caches hold, and
each token takes some at random, so that all weights come from memory.

Shape suffixes: T tokens, K experts of a token, E experts, B bytes of an expert, D hidden size, F
width.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from benchmarks.config import KernelsConfig
from benchmarks.real_size.model import QWEN3_30B_A3B
from benchmarks.reports import describe_machine, print_line, write_report
from predictors.errors import MoecastError, unknown
from runtime.store.ggml.library import TYPES, encode_rows, explain_missing, find_products
from runtime.store.ggml.matrix import RowMatrix, RowsPart
from runtime.transfer.arena import use_huge_pages

HIDDEN, WIDTH = QWEN3_30B_A3B["hidden_size"], QWEN3_30B_A3B["moe_intermediate_size"]
NUM_EXPERTS, TOP_K = QWEN3_30B_A3B["num_experts"], QWEN3_30B_A3B["num_experts_per_tok"]
READ_BYTES = 512 << 20
"""Bytes of a read that measures the memory's bandwidth."""


@dataclass(frozen=True, kw_only=True)
class KernelRow:
    """A type of rows, for gate, up and down alike."""

    kind: str
    threads: int
    seconds: float
    """One token's experts of a layer: the median."""
    bytes_per_second: float
    share: float
    """Share of the bandwidth that as many threads get without computing."""


def measure(call: Callable[[], object], repetitions: int) -> list[float]:
    seconds = []
    for _ in range(repetitions):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return seconds


def measure_bandwidth() -> float:
    """Return the bytes per second that a sum of a long vector by PyTorch's threads reads."""
    vector = torch.ones(READ_BYTES // 4)
    return READ_BYTES / min(measure(lambda: vector.sum(), 5))


def make_experts(kind: str) -> tuple[Tensor, RowMatrix, RowMatrix]:
    """Return random experts `(E, B)`, gate and up, and down."""
    generator = torch.Generator().manual_seed(0)
    up = RowMatrix([RowsPart(kind, 0, 2 * WIDTH)], HIDDEN)
    up_bytes = 2 * WIDTH * TYPES[kind].row_bytes(HIDDEN)
    down = RowMatrix([RowsPart(kind, up_bytes, HIDDEN)], WIDTH)
    rows = [
        encode_rows(kind, torch.randn(2 * WIDTH, HIDDEN, generator=generator)),
        encode_rows(kind, torch.randn(HIDDEN, WIDTH, generator=generator)),
    ]
    # Bytes of one expert for all, as the time does not depend on values; in pages as an arena's.
    expert_B = torch.cat(rows)
    slots_EB = torch.empty((NUM_EXPERTS, len(expert_B)), dtype=torch.uint8)
    use_huge_pages(slots_EB)
    return slots_EB.copy_(expert_B), up, down


def measure_kind(kind: str, threads: int, *, repetitions: int, seed: int) -> tuple[float, int]:
    """Return the seconds of a token's experts, and their bytes."""
    products, rng = find_products(), Random(seed)
    assert products is not None
    slots_EB, up, down = make_experts(kind)
    x_TD, results_KD = torch.randn(1, HIDDEN), torch.empty(TOP_K, HIDDEN)

    def compute() -> None:
        chosen = sorted(rng.sample(range(NUM_EXPERTS), TOP_K))
        products.compute(
            up.parts,
            HIDDEN,
            down.parts,
            [slots_EB[expert].data_ptr() for expert in chosen],
            [[place] for place in range(TOP_K)],
            TOP_K,
            1,
            x_TD.data_ptr(),
            results_KD.data_ptr(),
            threads,
        )

    return statistics.median(measure(compute, repetitions)), TOP_K * slots_EB.shape[1]


def run_kernels(config: KernelsConfig) -> None:
    """Measure every type with every number of threads.

    Raises:
        MoecastError: no such type, or no library.
    """
    if find_products() is None:
        raise MoecastError(f"kernels: {explain_missing()}")
    kinds = {kind.lower(): kind for kind in TYPES}
    for name in config.kind:
        if name.lower() not in kinds:
            raise MoecastError(unknown("kind", name, sorted(kinds)))
    machine = describe_machine(max(config.threads))
    bandwidth, rows = {}, []
    for threads in config.threads:
        torch.set_num_threads(threads)
        bandwidth[threads] = measure_bandwidth()
        print_line(f"{threads} threads: the memory gives {bandwidth[threads] / 1e9:.1f} GB/s")
        for name in config.kind:
            seconds, num_bytes = measure_kind(
                kinds[name.lower()], threads, repetitions=config.repetitions, seed=config.seed
            )
            speed = num_bytes / seconds
            rows.append(
                KernelRow(
                    kind=kinds[name.lower()],
                    threads=threads,
                    seconds=seconds,
                    bytes_per_second=speed,
                    share=speed / bandwidth[threads],
                )
            )
            print_line(
                f"{rows[-1].kind}, {threads} threads: {1e3 * seconds:.2f} ms, "
                f"{speed / 1e9:.1f} GB/s, {rows[-1].share:.0%}"
            )
    write_report(config, machine=machine, bandwidth=bandwidth, rows=rows)
