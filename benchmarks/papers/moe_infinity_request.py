"""MoE-Infinity (request level), tables 2 to 5, and the times of its transfers."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from benchmarks.papers.cells import CellFigures, ReplayTable, mean, ratios
from benchmarks.papers.claims import Comparison
from benchmarks.papers.paper_context import load_hardware, load_shape, load_system
from benchmarks.papers.published import read_settings
from runtime.config import HardwareConfig, SystemConfig
from runtime.sim.hardware import describe_hardware

PAPER = "moe-infinity-request"
MODELS = {
    "Switch": "switch-base-128",
    "NLLB": "nllb-moe",
    "Arctic": "arctic",
    "Mixtral": "mixtral-8x7b",
}
STRATEGIES = {
    "Dependency": "deepspeed",
    "Model-tracing": "brainstorm",
    "On-demand": "on-demand-at-once",
    "Ours": "moe-infinity-request",
}
UNCACHED_SHARE = 0.5
"""Room for transfers in flight; nothing is kept after its use (section 7.2)."""
FASTER = 4
"""Factor of the computation's speed in the test of tables 2 and 3."""
ROUTING = "one routing, of 60 experts (8 for Mixtral)"
SMALLER_SHARE = 0.5
"""Share of table 5's slots in the test of its reason: the paper's hit rates are lower."""


def slow_machine(*, speed: float = 1.0) -> HardwareConfig:
    """Returns a machine that computes `speed` times as fast as it fetches.

    MoE-Infinity (request level), section 7.2: the time of an expert's fetch mirrors "single expert
    inference latencies".
    """
    hardware = load_hardware("a5000-pcie4")
    return replace(
        hardware,
        name=f"a5000-pcie4, computing {speed:g} times as fast as fetching",
        memory_bytes_per_second=speed * hardware.link_bytes_per_second,
    )


def uncached(name: str) -> SystemConfig:
    """Returns a system that drops an expert after its use (section 7.2)."""
    return replace(load_system(name), drop_used=True, eviction="lru", eviction_options={})


def tables_2_3(table: ReplayTable) -> Iterator[Comparison]:

    def replay_strategies(model: str, hardware: HardwareConfig) -> dict[str, CellFigures]:
        return {
            strategy: table.replay(
                uncached(name), load_shape(model), hardware, share=UNCACHED_SHARE
            )
            for strategy, name in STRATEGIES.items()
        }

    def against(cells: Mapping[str, CellFigures], strategy: str, key: str) -> object:
        return getattr(cells[strategy], key) / getattr(cells["On-demand"], key)

    for title, model in MODELS.items():
        cells = replay_strategies(model, slow_machine())
        faster = replay_strategies(model, slow_machine(speed=FASTER))
        for number, key in ((2, "decode_stall_seconds"), (3, "decode_bytes")):
            for strategy in STRATEGIES:
                tested = strategy != "On-demand"
                yield Comparison(
                    f"table-{number}/{title}/{strategy}",
                    against(cells, strategy, key),
                    basis=ROUTING,
                    change=f"computing takes a {FASTER}th of the time that fetching takes"
                    if tested
                    else "",
                    changed=against(faster, strategy, key) if tested else None,
                )
        shape = load_shape(model)
        hardware = describe_hardware(load_hardware("a5000-pcie4"), shape)
        yield Comparison(
            f"fetch/{title}",
            hardware.transfer_seconds(shape.expert_bytes),
            basis="the described link and the shape's bytes",
        )


def table_4(table: ReplayTable) -> Iterator[Comparison]:
    """Adds the request-level system's parts one after another."""
    own = uncached("moe-infinity-request")
    plain = replace(own, priority="probability")
    variants = {
        "Vanilla prefetching": uncached("deepspeed"),
        "+ Request-level tracing": replace(plain, lookahead_layers=1),
        "+ Multi-layer": plain,
        "+ Layer-proximity": own,
    }
    cells = table.replay_all(
        variants,
        map(load_shape, MODELS.values()),
        slow_machine(),
        shares=[UNCACHED_SHARE],
    )
    vanilla = cells["Vanilla prefetching"]
    for name in variants:
        for column, key in (
            ("Bandwidth usage", "decode_bytes"),
            ("Blocking time", "decode_stall_seconds"),
        ):
            yield Comparison(
                f"table-4/{name}/{column}",
                mean(ratios(vanilla, cells[name], key)),
                basis=table.describe_basis(list(map(load_shape, MODELS.values()))),
            )


def table_5(table: ReplayTable) -> Iterator[Comparison]:
    hardware = load_hardware("a5000-pcie4")
    variants = {
        "LRU": replace(load_system("on-demand-at-once"), per_layer=False),
        "Model-tracing": load_system("brainstorm"),
        "Ours": load_system("moe-infinity-request"),
        "Ideal": replace(
            load_system("on-demand-at-once"), name="ideal", eviction="belady", per_layer=False
        ),
    }
    for title, cells in read_settings(PAPER, "table 5, section 7.3").items():
        shape = load_shape(MODELS[title])
        share = int(cells["#Buffer Slots"]) / (shape.num_layers * shape.num_experts)
        for strategy, system in variants.items():
            cell, smaller = (
                table.replay(system, shape, hardware, share=part * share)
                for part in (1.0, SMALLER_SHARE)
            )
            yield Comparison(
                f"table-5/{title}/{strategy}",
                cell.hit_rate,
                basis=f"{share:.1%} of experts; {ROUTING}",
                change="half as many slots, since the reference model's routing repeats itself "
                "more",
                changed=smaller.hit_rate,
            )


FIGURES = (tables_2_3, table_4, table_5)
