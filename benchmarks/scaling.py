"""More devices and more machines: simulated beside moe-infinity-sequence-level 8.6, figure 13.

    python -m benchmarks.scaling trace=runs/traces/qwen2-moe-tiny/NAME entries=runs/all/entries
        output=benchmarks/results/scaling.json

Experts are spread over the devices (`runtime.policy.placement`), each with an arena, a link and a
policy core of its own; requests over the machines; tokens travel to the devices of their experts
and back. The routing is the reference model's, folded to the shapes (`papers/ground.py`); times are
of the shape's own number of layers. `system=NAME` replays another system than the
paper's; a few minutes on one core.
"""

import json
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.papers.claim import Claim
from benchmarks.papers.ground import Ground, experts_bytes, machine, shape_named
from runtime.config import HardwareConfig, ShapeConfig
from runtime.sim.cluster import Interconnect

NODES = (1, 2, 3, 4, 5, 6)
GPUS_PER_NODE = 4
GPUS = (1, 2, 4, 8)
BATCH = 16
"""moe-infinity-sequence-level 8.2: sequences are batched up to so many."""
BATCH_PER_NODE = 7
"""For throughput: six machines are given all 42 requests that the trace has in groups of 7."""

SWITCH_LARGE = ShapeConfig(
    name="switch-large-128",
    source=(
        "moe-infinity-sequence-level 8.4 and 8.6: 3,072 experts of 33.6 MB in fp32, so 24 layers; "
        "hidden size 1024 and width 4096 give as much; others, for each such layer: two layers' "
        "self and cross attention 2 x 8 x 1024 x 1024 and a dense one's 2 x 1024 x 4096, four "
        "bytes each"
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
"""moe-infinity-sequence-level 8.4: of one GPU of the server, and of all GPUs of a node together,
whose memory the paper does not give."""

V100_NODE = HardwareConfig(
    name="v100-pcie3",
    source=(
        "four V100 and 385 GB of host memory, of which 90 % hold experts: "
        "moe-infinity-sequence-level 8.1; link 15.75 GB/s: PCIe 3.0 x16, 8 GT/s with 128b/130b "
        "coding; memory 900 GB/s and 15.7 TFLOPS in fp32: NVIDIA V100 data sheet; latency, kernel "
        "launches and predictor: as in a5000-pcie4"
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
"""8.6 on figure 13: on one node, and on six."""
REASON = (
    "the paper does not give its network, batch and GPU memory, nor whose tokens it counts; here "
    "each node adds its memory and its links to all others', so that misses become fewer and each "
    "cheaper"
)


def interconnect(shape: ShapeConfig, *, nodes: int, devices: int, link: float) -> Interconnect:
    """Hidden states in the shape's own precision."""
    return Interconnect(
        num_nodes=nodes,
        devices_per_node=devices,
        token_bytes=int(shape.hidden_size * shape.bytes_per_weight),
        device_bytes_per_second=link,
        **NETWORK,
    )


def cell(
    ground: Ground,
    system: str,
    shape: ShapeConfig,
    hardware: HardwareConfig,
    *,
    nodes: int,
    devices: int,
    batch: int,
    arena_bytes: float,
) -> dict[str, Any]:
    """One replay, `arena_bytes` of each device, in times of the shape's number of layers."""
    found = ground.run(
        ground.systems[system],
        shape,
        hardware,
        share=arena_bytes / experts_bytes(shape),
        batch=batch,
        interconnect=interconnect(
            shape, nodes=nodes, devices=devices, link=hardware.link_bytes_per_second
        ),
    )
    deeper = shape.num_layers / ground.trace.spec.num_layers
    return {
        "shape": shape.name,
        "machine": hardware.name,
        "nodes": nodes,
        "devices": devices,
        "batch": batch,
        "latency_ms": 1e3 * found["tpot_seconds"] * deeper,
        "tokens_per_second": found["tokens_per_second"] / deeper,
        "hit_rate": found["hit_rate"],
        "decode_stall_share": found["decode_stall_share"],
        "decode_bytes": found["decode_bytes"],
    }


def claims(rows: list[dict[str, Any]]) -> list[Claim]:
    """What the text says of figure 13, beside the replays."""
    found = []
    for name, (one, six, unit) in PUBLISHED.items():
        key = "latency_ms" if unit == "ms a token" else "tokens_per_second"
        by = {}
        for row in rows:
            batch = BATCH if key == "latency_ms" else row["nodes"] * BATCH_PER_NODE
            if (row["machine"], row["shape"], row["batch"]) == (V100_NODE.name, name, batch):
                by[row["nodes"]] = row[key]
        values = (
            ("1 node", one, by[1]),
            ("6 nodes", six, by[6]),
            ("6 nodes to 1", six / one, by[6] / by[1]),
        )
        for what, paper, ours in values:
            found.append(
                Claim(
                    paper="moe-infinity-sequence",
                    where="figure 13, 8.6",
                    what=f"{name}: {unit}, {what}",
                    paper_value=paper,
                    ours=ours,
                    reason=REASON,
                )
            )
    return found


def main(arguments: dict[str, str]) -> None:
    started = time.monotonic()
    ground = Ground(
        Path(arguments["trace"]),
        entries=Path(arguments["entries"]) if "entries" in arguments else None,
        new_tokens=int(arguments.get("new_tokens", "100")),
    )
    system = arguments.get("system", "moe-infinity-sequence")
    shapes = (SWITCH_LARGE, shape_named("nllb-moe"))
    server = replace(machine("a5000-pcie4"), store_bytes_per_second=0.0, host_bytes=0.0)
    rows: list[dict[str, Any]] = []
    for shape in shapes:
        of_gpu = ARENA_BYTES[shape.name]
        cells: list[dict[str, Any]] = [
            {"hardware": V100_NODE, "nodes": nodes, "devices": GPUS_PER_NODE, "batch": batch}
            for nodes in NODES
            for batch in (BATCH, nodes * BATCH_PER_NODE)
        ]
        cells = [{**one, "arena_bytes": of_gpu / GPUS_PER_NODE} for one in cells]
        cells += [
            {"hardware": server, "nodes": 1, "devices": n, "batch": BATCH, "arena_bytes": of_gpu}
            for n in GPUS
        ]
        for one in cells:
            rows.append(cell(ground, system, shape, **one))
            sys.stderr.write(f"{time.monotonic() - started:5.0f} s  {rows[-1]}\n")
    report = {
        "trace": ground.trace.digest,
        "system": system,
        "batch": BATCH,
        "batch_per_node": BATCH_PER_NODE,
        "network": NETWORK,
        "machines": [asdict(V100_NODE), asdict(server)],
        "shapes": [asdict(shape) for shape in shapes],
        "arena_bytes": ARENA_BYTES,
        "seconds": round(time.monotonic() - started),
        "rows": rows,
        "claims": [asdict(claim) for claim in claims(rows)],
    }
    Path(arguments["output"]).write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")


if __name__ == "__main__":
    main(dict(argument.split("=", 1) for argument in sys.argv[1:]))
