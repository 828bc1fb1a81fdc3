"""More devices and more machines, replayed: MoE-Infinity (sequence level), section 8.6, figure 13.

Experts are spread over the devices (`runtime.policy.placement`), each with an arena, a link and a
policy core; requests are spread over the machines; tokens travel to the devices of their experts
and back. The routing is the reference model's, folded to the shapes (`papers/paper_context.py`);
times are those of the shape's own number of layers. A few minutes on one core.
"""

import time
from dataclasses import dataclass, replace

from benchmarks.config import ScalingConfig
from benchmarks.papers.claims import Claim
from benchmarks.papers.paper_context import PaperContext, experts_bytes, load_hardware, load_shape
from benchmarks.reports import print_line, write_report
from runtime.config import HardwareConfig, ShapeConfig
from runtime.presets import load_system
from runtime.sim.cluster import Interconnect

NODES = (1, 2, 3, 4, 5, 6)
GPUS_PER_NODE = 4
GPUS = (1, 2, 4, 8)
BATCH = 16
"""Largest batch of MoE-Infinity (sequence level), section 8.2."""
BATCH_PER_NODE = 7
"""Batch of each machine for throughput: the trace has 42 requests in groups of 7."""

SWITCH_LARGE = ShapeConfig(
    name="switch-large-128",
    source=(
        "MoE-Infinity (sequence level), sections 8.4 and 8.6: 3,072 experts of 33.6 MB in fp32, so "
        "24 layers; hidden size 1024 and width 4096 give as much; others, for each such layer: two "
        "layers' self and cross attention 2 x 8 x 1024 x 1024 and a dense one's 2 x 1024 x 4096, "
        "four bytes each"
    ),
    num_layers=24,
    num_experts=128,
    top_k=1,
    hidden_size=1024,
    expert_bytes=33_554_432,
    layer_bytes=100_663_296,
    bytes_per_weight=4.0,
)
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
)
NETWORK = {"node_latency_seconds": 5e-6, "node_bytes_per_second": 12.5e9}
"""Not in the paper: 100 Gbit/s and five microseconds, as InfiniBand of the V100's time."""

PUBLISHED = {
    "switch-large-128": (200.0, 97.0, "ms a token"),
    "nllb-moe": (600.0, 2400.0, "tokens a second"),
}
"""Section 8.6 on figure 13: on one node, on six, and the unit."""
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
    latency_ms: float
    tokens_per_second: float
    hit_rate: float | None
    decode_stall_share: float
    decode_bytes: int


@dataclass(frozen=True, kw_only=True)
class ScalingReport:
    trace: str
    system: str
    batch: int
    batch_per_node: int
    network: dict[str, float]
    machines: list[HardwareConfig]
    shapes: list[ShapeConfig]
    arena_bytes: dict[str, float]
    seconds: float
    rows: list[ScalingRow]
    claims: list[Claim]


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
            for batch in (BATCH, nodes * BATCH_PER_NODE)
        ),
        *(
            ReplayedCluster(
                hardware=server, nodes=1, devices=n, batch=BATCH, arena_bytes=arena_bytes
            )
            for n in GPUS
        ),
    ]


def replay_cluster(
    context: PaperContext, system: str, shape: ShapeConfig, cluster: ReplayedCluster
) -> ScalingRow:
    cell = context.run(
        load_system(system),
        shape,
        cluster.hardware,
        share=cluster.arena_bytes / experts_bytes(shape),
        batch=cluster.batch,
        interconnect=interconnect(
            shape,
            nodes=cluster.nodes,
            devices=cluster.devices,
            link=cluster.hardware.link_bytes_per_second,
        ),
    )
    deeper = shape.num_layers / context.trace.spec.num_layers
    return ScalingRow(
        shape=shape.name,
        machine=cluster.hardware.name,
        nodes=cluster.nodes,
        devices=cluster.devices,
        batch=cluster.batch,
        latency_ms=1e3 * cell.tpot_seconds * deeper,
        tokens_per_second=cell.tokens_per_second / deeper,
        hit_rate=cell.hit_rate,
        decode_stall_share=cell.decode_stall_share,
        decode_bytes=cell.decode_bytes,
    )


def compare_claims(rows: list[ScalingRow]) -> list[Claim]:
    """Compares the text on figure 13 with the replays."""
    claims = []
    for name, (one, six, unit) in PUBLISHED.items():
        by_nodes: dict[int, float] = {}
        for row in rows:
            if (row.machine, row.shape) != (V100_NODE.name, name):
                continue
            if unit == "ms a token":
                if row.batch == BATCH:
                    by_nodes[row.nodes] = row.latency_ms
            elif row.batch == row.nodes * BATCH_PER_NODE:
                by_nodes[row.nodes] = row.tokens_per_second
        for what, paper, ours in (
            ("1 node", one, by_nodes[1]),
            ("6 nodes", six, by_nodes[6]),
            ("6 nodes to 1", six / one, by_nodes[6] / by_nodes[1]),
        ):
            claims.append(
                Claim(
                    paper="moe-infinity-sequence",
                    where="figure 13, 8.6",
                    what=f"{name}: {unit}, {what}",
                    paper_value=paper,
                    ours=ours,
                    reason=REASON,
                )
            )
    return claims


def run_scaling(config: ScalingConfig) -> None:
    started = time.monotonic()
    context = PaperContext(config.trace, entries=config.entries, new_tokens=config.replay_tokens)
    shapes = [SWITCH_LARGE, load_shape("nllb-moe")]
    server = replace(load_hardware("a5000-pcie4"), store_bytes_per_second=0.0, host_bytes=0.0)
    rows = []
    for shape in shapes:
        for cluster in clusters(shape, server):
            rows.append(replay_cluster(context, config.system, shape, cluster))
            print_line(f"{time.monotonic() - started:5.0f} s  {rows[-1]}")
    report = ScalingReport(
        trace=context.trace.digest,
        system=config.system,
        batch=BATCH,
        batch_per_node=BATCH_PER_NODE,
        network=NETWORK,
        machines=[V100_NODE, server],
        shapes=shapes,
        arena_bytes=ARENA_BYTES,
        seconds=round(time.monotonic() - started),
        rows=rows,
        claims=compare_claims(rows),
    )
    write_report(config, report)
