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


def interconnect(shape: ShapeConfig, *, nodes: int, devices: int, link: float) -> Interconnect:
    """Returns links that carry hidden states in the shape's own precision."""
    return Interconnect(
        num_nodes=nodes,
        devices_per_node=devices,
        token_bytes=int(shape.hidden_size * shape.bytes_per_weight),
        device_bytes_per_second=link,
        **NETWORK,
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


@dataclass(frozen=True, kw_only=True)
class ReplayedCluster:
    """Machines with devices, and the requests that they serve."""

    hardware: HardwareConfig
    nodes: int
    devices: int
    batch: int
    arena_bytes: float
    """Memory for experts of each device."""


def clusters(shape: ShapeConfig, server: HardwareConfig) -> list[ReplayedCluster]:
    """Returns the machines that a shape is replayed on."""
    arena_bytes = ARENA_BYTES[shape.name]
    return [
        *(
            ReplayedCluster(
                hardware=V100_NODE,
                nodes=nodes,
                devices=GPUS_PER_NODE,
                batch=batch,
                arena_bytes=arena_bytes / GPUS_PER_NODE,
            )
            for nodes in NODES
            for batch in sorted({BATCH, nodes * BATCH_PER_NODE})
        ),
        *(
            ReplayedCluster(
                hardware=server, nodes=1, devices=n, batch=BATCH, arena_bytes=arena_bytes
            )
            for n in GPUS
        ),
    ]


def make_cell(shape: ShapeConfig, cluster: ReplayedCluster) -> PaperCell:
    return PaperCell(
        system=load_system(PAPER),
        shape=shape,
        hardware=cluster.hardware,
        share=cluster.arena_bytes / experts_bytes(shape),
        batch=cluster.batch,
        interconnect=interconnect(
            shape,
            nodes=cluster.nodes,
            devices=cluster.devices,
            link=cluster.hardware.link_bytes_per_second,
        ),
    )


def describe_replay(
    shape: ShapeConfig, cluster: ReplayedCluster, result: CellResult, num_layers: int
) -> ScalingRow:
    """Returns the figures of a replay of `num_layers` of the shape's layers."""
    sums, samples = result.units.sum(), result.units.resample()
    deeper = shape.num_layers / num_layers
    latency_ms = interval(1e3 * samples.tpot_seconds * deeper)
    tokens_per_second = interval(samples.tokens_per_second / deeper)
    return ScalingRow(
        shape=shape.name,
        machine=cluster.hardware.name,
        nodes=cluster.nodes,
        devices=cluster.devices,
        batch=cluster.batch,
        decode_tokens=int(sums.decode_tokens),
        latency_ms=float(1e3 * sums.tpot_seconds * deeper),
        latency_interval_ms=latency_ms,
        tokens_per_second=float(sums.tokens_per_second / deeper),
        tokens_per_second_interval=tokens_per_second,
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
    places = [(shape, cluster) for shape in shapes for cluster in clusters(shape, server)]
    cells = [make_cell(shape, cluster) for shape, cluster in places]
    found = PaperReplays(trace, config).run(cells)
    results = [found[cell.digest()] for cell in cells]
    rows = [
        describe_replay(shape, cluster, result, trace.spec.num_layers)
        for (shape, cluster), result in zip(places, results, strict=True)
    ]

    def figures(of: Callable[[UnitSums], CellFigures]) -> ClusterFigures:
        """Returns latencies in seconds and throughputs."""
        measured = {}
        for (shape, cluster), result in zip(places, results, strict=True):
            if cluster.hardware is V100_NODE:
                own, deeper = of(result.units), shape.num_layers / trace.spec.num_layers
                measured[shape.name, cluster.nodes, cluster.batch] = (
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
