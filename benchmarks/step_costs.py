"""`python -m benchmarks.step_costs` prints what a decode step costs on GPUs, on paper.

Three things take time at once, and the longest decides: the host issues kernels, copies and waits
(counted on a simulated device, `tests/devices/counts.json`), the link moves the experts that are
missed, and the device's memory is read once for every expert and dense weight that a token uses.
Nothing here was measured on a GPU.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

COUNTS = Path(__file__).parents[1] / "tests" / "devices" / "counts.json"

LAUNCH_US = 5.0
"""A kernel issued by PyTorch: `kernel_us` of `configs/hardware`."""
COPY_US = 6.0
"""`cudaMemcpyAsync` takes 5 to 7 us a call: arXiv 2602.21548, section 5.2."""
WAIT_US = 20.0
"""Host to device and back, PyTorch on a V100: NVIDIA's guide to Nsight Systems, as quoted in
https://groundy.com/articles/every-cuda-kernel-pays-a-launch-tax-the-host-to-device-walkthrough/"""
CALL_US = 0.1
"""A call of a Python function, interpreted; compiled ones take a tenth of it."""
GRAPH_US = 1.0
"""A kernel within a CUDA graph, on the device: an assumption."""


@dataclass(frozen=True)
class Gpu:
    name: str
    link: float
    """Bytes a second from pinned host memory."""
    memory: float
    """Bytes a second."""


GPUS = (
    Gpu("RTX 4090, PCIe 4.0 x16", 0.8 * 31.5e9, 1008e9),  # NVIDIA, Ada white paper
    Gpu("H100 SXM, PCIe 5.0 x16", 0.8 * 63.0e9, 3350e9),  # NVIDIA, H100 data sheet
    # https://data-check.eu/en/nvidia-geforce-rtx-4070-laptop-gpu/, and for the eight lanes of AD106
    # https://game-drip.com/palit-releases-geforce-rtx-4060-dual-and-stormx-with-trimmed-pcie-x8-interface/
    Gpu("RTX 4070 laptop, PCIe 4.0 x8", 0.8 * 15.75e9, 256e9),
)
"""Four fifths of the lanes' rate are for data: an assumption."""


@dataclass(frozen=True)
class Shape:
    """Qwen3-30B-A3B in bfloat16, from its configuration."""

    layers: int = 48
    top_k: int = 8
    expert_bytes: float = 3 * 2048 * 768 * 2
    dense_bytes: float = 3.1e9
    """Attention, routers, embeddings."""


MISSED = {"25%": 0.6, "100%": 0.0}
"""Share of a token's experts that are not there: LRU on published routing hits .57 at half of the
experts (docs/results.md); .4 at a quarter is an assumption."""


def host_seconds(counts: Mapping[str, float], shape: Shape) -> float:
    """Return the time of the host for a step, of counts per layer."""
    copies = counts["copies to the device"] + counts["copies to the host"]
    micros = LAUNCH_US * counts["launches"] + COPY_US * copies + CALL_US * counts["calls"]
    return 1e-6 * shape.layers * (micros + WAIT_US * counts["synchronisations"])


def make_rows(table: Mapping[str, Mapping[str, float]]) -> list[list[str]]:
    """Return a row for each GPU and cell: milliseconds, and what bounds them."""
    shape, rows = Shape(), []
    for gpu in GPUS:
        for cell in ("moecast, grouped, 25%", "moecast, grouped, 100%"):
            missed = MISSED[cell.rpartition(" ")[2]] * shape.top_k * shape.layers
            read = shape.dense_bytes + shape.layers * shape.top_k * shape.expert_bytes
            parts = {
                "host": host_seconds(table[cell], shape),
                "link": missed * shape.expert_bytes / gpu.link,
                "memory": read / gpu.memory,
            }
            graph = max(
                parts["link"],
                parts["memory"],
                1e-6 * GRAPH_US * shape.layers * table[cell]["launches"],
            )
            bound = max(parts, key=lambda name: parts[name])
            times = [f"{1e3 * seconds:.1f}" for seconds in parts.values()]
            rows.append(
                [gpu.name, cell, *times, f"{1 / parts[bound]:.0f} ({bound})", f"{1 / graph:.0f}"]
            )
    return rows


def main() -> None:
    head = ["GPU", "cell", "host, ms", "link, ms", "memory, ms", "tokens/s at most", "in a graph"]
    lines = [head, ["---"] * len(head), *make_rows(json.loads(COUNTS.read_text()))]
    sys.stdout.write("".join(f"| {' | '.join(line)} |\n" for line in lines))


if __name__ == "__main__":
    main()
