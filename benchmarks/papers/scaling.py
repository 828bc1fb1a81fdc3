"""More devices and more machines, replayed: MoE-Infinity (sequence level), section 8.6, figure 13.

Experts are spread over the devices (`runtime.policy.placement`), each with an arena, a link and a
policy core; requests are spread over the machines; tokens travel to the devices of their experts
and back. The routing is the reference model's, folded to the shapes (`paper_context.py`);
times are those of the shape's own number of layers. Replays run in several processes, and an
interrupted command resumes.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from benchmarks.cluster import Interconnect
from benchmarks.papers.cells import CellFigures, CellResult, Figure, PaperCell, UnitSums
from benchmarks.papers.claims import Comparison, Interval, interval, make_claims
from benchmarks.papers.config import ScalingConfig
from benchmarks.papers.jobs import PaperReplays
from benchmarks.papers.moe_infinity_sequence import PAPER, SWITCH_LARGE
from benchmarks.papers.paper_context import (
    experts_bytes,
    load_hardware,
    load_shape,
    load_system,
)
from benchmarks.reports import describe_machine, print_line, write_report
from collect.traces import Trace
from runtime.config import HardwareConfig, ShapeConfig

NODES = (1, 2, 3, 4, 5, 6)
GPUS_PER_NODE = 4
GPUS = (1, 2, 4, 8)
BATCH = 16
"""Largest batch of MoE-Infinity (sequence level), section 8.2."""
BATCH_PER_NODE = 16
"""Batch of each machine for throughput."""

ARENA_BYTES = {"switch-large-128": 15e9, "nllb-moe": 8e9}
"""Memory for experts of one GPU of the server, and of all GPUs of a node together (MoE-Infinity,
sequence level, section 8.4); the paper gives none for the node."""

V100_NODE = HardwareConfig(
    name="v100-pcie3",
    source=(
        "four V100 and 385 GB of host memory, of which 90 % hold experts: "
        "MoE-Infinity (sequence level), section 8.1; link 15.75 GB/s: PCIe 3.0 x16, 8 GT/s with "
        "128b/130b coding; memory 900 GB/s and 15.7 TFLOPS in fp32: NVIDIA V100 data sheet; "
        "latency, kernel launches and predictor: as in a5000-pcie4"
    ),
    measured=False,
    link_bytes_per_second=15.75e9,
    link_latency_us=10.0,
    host_bytes=346e9,
    memory_bytes_per_second=900e9,
    flops=15.7e12,
    kernel_us=5.0,
    predictor_us=21.0,
    predictor_kind="eam-request",
)
NETWORK = {"node_latency_seconds": 5e-6, "node_bytes_per_second": 12.5e9}
"""Not in the paper: 100 Gbit/s and five microseconds, as InfiniBand of the V100's time."""

REASON = (
    "the paper does not give its network, batch and GPU memory, nor whose tokens it counts; here "
    "each node adds its memory and its links to all others', so that misses become fewer and each "
    "cheaper"
)


@dataclass(frozen=True, kw_only=True)
class ScalingRow:
    """One replay; times are those of the shape's number of layers."""

    shape: str
    machine: str
    nodes: int
    devices: int
    """Devices of a node."""
    batch: int
    decode_tokens: int
    latency_ms: float
    latency_interval_ms: Interval
    """95 % confidence interval over batches of requests; None: too few of them."""
    tokens_per_second: float
    tokens_per_second_interval: Interval
    hit_rate: float | None
    decode_stall_share: float
    decode_bytes: int


def list_cells(shape: ShapeConfig, server: HardwareConfig) -> list[PaperCell]:
    """Returns the replays of a shape on nodes of V100s, and on more and more GPUs of one server."""
    places = [
        (V100_NODE, nodes, GPUS_PER_NODE, batch)
        for nodes in NODES
        for batch in sorted({BATCH, nodes * BATCH_PER_NODE})
    ]
    places += [(server, 1, gpus, BATCH) for gpus in GPUS]
    return [
        PaperCell(
            system=load_system(PAPER),
            shape=shape,
            hardware=hardware,
            share=arena_bytes(shape, hardware) / experts_bytes(shape),
            batch=batch,
            interconnect=Interconnect(
                num_nodes=nodes,
                devices_per_node=devices,
                # Hidden states in the shape's own precision.
                token_bytes=int(shape.hidden_size * shape.bytes_per_weight),
                device_bytes_per_second=hardware.link_bytes_per_second,
                **NETWORK,
            ),
        )
        for hardware, nodes, devices, batch in places
    ]


def arena_bytes(shape: ShapeConfig, hardware: HardwareConfig) -> float:
    """Returns the memory for experts of each device."""
    return ARENA_BYTES[shape.name] / (GPUS_PER_NODE if hardware is V100_NODE else 1)


def describe_replay(cell: PaperCell, result: CellResult, num_layers: int) -> ScalingRow:
    """Returns the figures of a replay of `num_layers` of the shape's layers."""
    shape, links = cell.shape, cell.interconnect
    assert links is not None, cell
    sums, samples = result.units.sum(), result.units.resample()
    deeper = shape.num_layers / num_layers
    return ScalingRow(
        shape=shape.name,
        machine=cell.hardware.name,
        nodes=links.num_nodes,
        devices=links.devices_per_node,
        batch=cell.batch,
        decode_tokens=int(sums.decode_tokens),
        latency_ms=float(1e3 * sums.tpot_seconds * deeper),
        latency_interval_ms=interval(1e3 * samples.tpot_seconds * deeper),
        tokens_per_second=float(sums.tokens_per_second / deeper),
        tokens_per_second_interval=interval(samples.tokens_per_second / deeper),
        hit_rate=float(sums.hit_rate),
        decode_stall_share=float(sums.decode_stall_share),
        decode_bytes=int(sums.decode_bytes),
    )


ClusterFigures = Mapping[tuple[str, int, int], tuple[Figure, Figure]]
"""Latency and throughput of a shape on a number of nodes with a batch."""


def figure_13(measured: ClusterFigures) -> Iterator[Comparison]:
    """Compares the text on figure 13 with the replays."""
    for nodes in (NODES[0], NODES[-1]):
        latency, _ = measured["switch-large-128", nodes, BATCH]
        _, throughput = measured["nllb-moe", nodes, nodes * BATCH_PER_NODE]
        yield Comparison(f"figure-13/latency/{nodes}", latency, reason=REASON)
        yield Comparison(f"figure-13/throughput/{nodes}", throughput, reason=REASON)


def run_scaling(config: ScalingConfig) -> None:
    started = time.monotonic()
    machine = describe_machine()
    shapes = [SWITCH_LARGE, load_shape("nllb-moe")]
    server = replace(load_hardware("a5000-pcie4"), store_bytes_per_second=0.0, host_bytes=0.0)
    trace = Trace.open(config.trace)
    cells = [cell for shape in shapes for cell in list_cells(shape, server)]
    found = PaperReplays(trace, config).run(cells)
    replays = [(cell, found[cell.digest()]) for cell in cells]
    rows = [describe_replay(cell, result, trace.spec.num_layers) for cell, result in replays]

    def figures(of: Callable[[UnitSums], CellFigures]) -> ClusterFigures:
        """Returns latencies in seconds and throughputs."""
        measured = {}
        for cell, result in replays:
            if cell.hardware is V100_NODE and cell.interconnect is not None:
                own, deeper = of(result.units), cell.shape.num_layers / trace.spec.num_layers
                measured[cell.shape.name, cell.interconnect.num_nodes, cell.batch] = (
                    own.tpot_seconds * deeper,
                    own.tokens_per_second / deeper,
                )
        return measured

    for row in rows:
        print_line(str(row))
    write_report(
        config,
        trace=trace.digest,
        system=PAPER,
        batch=BATCH,
        batch_per_node=BATCH_PER_NODE,
        network=NETWORK,
        machines=[V100_NODE, server],
        shapes=shapes,
        arena_bytes=ARENA_BYTES,
        seconds=round(time.monotonic() - started),
        machine=machine,
        rows=rows,
        claims=make_claims(
            PAPER, figure_13(figures(UnitSums.sum)), figure_13(figures(UnitSums.resample))
        ),
    )
