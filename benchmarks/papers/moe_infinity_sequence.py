"""MoE-Infinity (sequence level), figures 9 to 11; figure 13 is in `benchmarks.papers.scaling`."""

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.papers.cells import ReplayTable, maximum
from benchmarks.papers.claims import Comparison
from benchmarks.papers.paper_context import load_hardware, load_shape, load_system
from runtime.config import HardwareConfig, ShapeConfig

PAPER = "moe-infinity-sequence"

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
CACHED = {"switch-large-128": 535, "nllb-moe": 60}
"""Experts that the GPU holds (section 8.4)."""
BANDWIDTHS = (8, 128)
"""Least and largest bandwidth of figure 10, in GB/s."""
ROUTING = "one routing, of 60 experts"
BASELINES = ("lfu", "lru", "neighbour")


def machine(gigabytes_per_second: float | None = None) -> HardwareConfig:
    hardware = load_hardware("a5000-pcie4")
    if gigabytes_per_second is None:
        return hardware
    return replace(hardware, link_bytes_per_second=1e9 * gigabytes_per_second)


def models() -> dict[str, ShapeConfig]:
    return {"switch-large-128": SWITCH_LARGE, "nllb-moe": load_shape("nllb-moe")}


def cached_share(shape: ShapeConfig) -> float:
    return CACHED[shape.name] / (shape.num_layers * shape.num_experts)


def figure_9(table: ReplayTable) -> Iterator[Comparison]:
    """Compares accuracies: correct experts of the top_k that a predictor ranks first."""
    for name, system in (
        ("moe-infinity", "moe-infinity-sequence"),
        ("traced", "brainstorm"),
        ("top-k", "deepspeed"),
    ):
        cell = table.replay(
            load_system(system),
            SWITCH_LARGE,
            machine(),
            share=cached_share(SWITCH_LARGE),
            measures_accuracy=True,
        )
        yield Comparison(f"figure-9/{name}", cell.accuracy, basis="60 experts, decode")


def figure_10(table: ReplayTable) -> Iterator[Comparison]:
    """Compares the share of needed experts that are on the device in time, prefetched or cached."""
    own = load_system("moe-infinity-sequence")
    for title, shape in models().items():
        for bandwidth in BANDWIDTHS:
            cell = table.replay(own, shape, machine(bandwidth), share=cached_share(shape))
            yield Comparison(f"figure-10/{title}/{bandwidth}", cell.hit_rate, basis=ROUTING)
    for shape, share in (
        (load_shape("switch-base-128"), cached_share(SWITCH_LARGE)),
        (load_shape("nllb-moe"), cached_share(load_shape("nllb-moe"))),
    ):
        refined, once = (
            table.replay(own, shape, machine(), share=share, only_first_forecast=only_first)
            for only_first in (False, True)
        )
        yield Comparison(
            f"refinement/{shape.name}",
            refined.hit_rate - once.hit_rate,
            basis=f"{ROUTING}; room for {share:.1%} of the experts",
        )


def figure_11(table: ReplayTable) -> Iterator[Comparison]:
    """Compares hit rates of the eviction policies under the same prefetching."""
    own = load_system("moe-infinity-sequence")
    for title, shape in models().items():
        hits = {}
        for eviction in (own.eviction, *BASELINES, "belady"):
            options = {"reset_on_eviction": True} if eviction == "lfu" else {}
            system = own
            if eviction != own.eviction:
                system = replace(own, name=eviction, eviction=eviction, eviction_options=options)
            cell = table.replay(system, shape, machine(), share=cached_share(shape))
            hits[eviction] = cell.hit_rate
        for name, value in (
            ("moe-infinity", hits[own.eviction]),
            ("below-oracle", hits["belady"] - hits[own.eviction]),
            ("best-baseline", maximum(hits[name] for name in BASELINES)),
        ):
            yield Comparison(f"figure-11/{title}/{name}", value, basis=ROUTING)


FIGURES = (figure_9, figure_10, figure_11)
