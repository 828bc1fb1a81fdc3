"""MoE-Infinity (request level), tables 2 to 5."""

from dataclasses import replace

from benchmarks.papers.claims import FigureReplay, ReplayCell, mean, ratios
from benchmarks.papers.paper_context import PaperContext, load_hardware, load_shape
from runtime.config import HardwareConfig
from runtime.presets import load_system

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
    "On-demand": "on-demand",
    "Ours": "moe-infinity-request",
}
BLOCKING = {
    "Switch": (2.30, 0.51, 1.0, 0.12),
    "NLLB": (1.47, 0.71, 1.0, 0.31),
    "Arctic": (1.95, 0.63, 1.0, 0.43),
    "Mixtral": (1.47, 0.91, 1.0, 0.37),
}
BANDWIDTH = {
    "Switch": (2.39, 2.04, 1.0, 1.68),
    "NLLB": (1.48, 1.27, 1.0, 1.26),
    "Arctic": (1.83, 1.86, 1.0, 1.87),
    "Mixtral": (1.43, 1.01, 1.0, 1.43),
}
HITS = {
    "Switch": (953, 0.31, 0.39, 0.52, 0.63),
    "NLLB": (52, 0.18, 0.25, 0.46, 0.51),
    "Arctic": (76, 0.09, 0.12, 0.28, 0.32),
    "Mixtral": (39, 0.02, 0.05, 0.17, 0.21),
}
"""Table 5: buffer slots, then hit rates of LRU, model-tracing, the paper's system, the ideal."""


def as_slow_as_its_link() -> HardwareConfig:
    """Returns a machine whose memory is as slow as its link.

    MoE-Infinity (request level), section 7.2: the time of an expert's fetch mirrors "single expert
    inference latencies".
    """
    hardware = load_hardware("a5000-pcie4")
    return replace(
        hardware,
        name="a5000-pcie4, computing as slowly as fetching",
        memory_bytes_per_second=hardware.link_bytes_per_second,
    )


UNCACHED_SHARE = 0.5
"""Room for transfers in flight; nothing is kept after its use (section 7.2)."""
ROUTING = (
    "the reference model's routing of 60 experts for encoder-decoders' of 128; and where computing "
    "takes as long as fetching, an idle link of the replay transfers everything that is forecast"
)


def tables_2_3(context: PaperContext) -> FigureReplay:
    """Replays without caching: an expert is dropped after its use (section 7.2)."""
    figure, hardware = FigureReplay(PAPER), as_slow_as_its_link()
    for title, model in MODELS.items():
        cells: dict[str, ReplayCell] = {}
        for strategy, name in STRATEGIES.items():
            system = replace(load_system(name), drop_used=True, eviction="lru")
            cell = context.run(system, load_shape(model), hardware, share=UNCACHED_SHARE)
            cells[strategy] = figure.keep(cell, "moe-infinity 2, 3")
        base = cells["On-demand"]
        for table, key, values, what in (
            ("table 2", "decode_stall_seconds", BLOCKING, "GPU blocking time"),
            ("table 3", "decode_bytes", BANDWIDTH, "bandwidth usage"),
        ):
            for strategy, value in zip(STRATEGIES, values[title], strict=True):
                figure.claim(
                    where=f"{table}, 7.2",
                    what=f"{title}: {what} of {strategy} against on demand",
                    paper_value=value,
                    ours=getattr(cells[strategy], key) / getattr(base, key),
                    reason="" if strategy == "On-demand" else ROUTING,
                )
    return figure


def table_4(context: PaperContext) -> FigureReplay:
    """Adds the request-level system's parts one after another."""
    figure, hardware = FigureReplay(PAPER), as_slow_as_its_link()
    own = replace(load_system("moe-infinity-request"), drop_used=True, eviction="lru")
    plain = replace(own, predictor_priority=False, priority="probability")
    variants = {
        "Vanilla prefetching": replace(load_system("deepspeed"), drop_used=True, eviction="lru"),
        "+ Request-level tracing": replace(plain, lookahead_layers=1),
        "+ Multi-layer": plain,
        "+ Layer-proximity": own,
    }
    published = ((1.0, 1.0), (0.56, 0.55), (0.73, 0.39), (0.68, 0.32))
    cells: dict[str, list[ReplayCell]] = {}
    for model in MODELS.values():
        for variant, system in variants.items():
            named = replace(system, name=variant)
            cell = context.run(named, load_shape(model), hardware, share=UNCACHED_SHARE)
            cells.setdefault(variant, []).append(figure.keep(cell, "moe-infinity 4"))
    vanilla = cells["Vanilla prefetching"]
    for variant, (bandwidth, blocking) in zip(variants, published, strict=True):
        for what, value, key in (
            ("bandwidth usage", bandwidth, "decode_bytes"),
            ("blocking time", blocking, "decode_stall_seconds"),
        ):
            figure.claim(
                where="table 4, 7.2",
                what=f"{variant}: {what} against vanilla prefetching, mean of models",
                paper_value=value,
                ours=mean(ratios(vanilla, cells[variant], key)),
                reason="" if variant.startswith("Vanilla") else ROUTING,
            )
    return figure


def table_5(context: PaperContext) -> FigureReplay:
    figure, hardware = FigureReplay(PAPER), load_hardware("a5000-pcie4")
    ideal = replace(load_system("on-demand"), name="ideal", eviction="belady", per_layer=False)
    variants = {
        "LRU": replace(load_system("on-demand"), per_layer=False),
        "Model-tracing": load_system("brainstorm"),
        "Ours": load_system("moe-infinity-request"),
        "Ideal": ideal,
    }
    for title, model in MODELS.items():
        slots, *values = HITS[title]
        shape = load_shape(model)
        share = slots / (shape.num_layers * shape.num_experts)
        for (strategy, system), value in zip(variants.items(), values, strict=True):
            cell = figure.keep(
                context.run(system, shape, hardware, share=share), figure="moe-infinity 5"
            )
            figure.claim(
                where="table 5, 7.3",
                what=f"{title}, {slots} slots ({share:.1%} of experts): hit rate of {strategy}",
                paper_value=value,
                ours=cell.hit_rate,
                reason="the reference model's routing is more local within a request",
            )
    return figure


FIGURES = (("tables 2 and 3", tables_2_3), ("table 4", table_4), ("table 5", table_5))
