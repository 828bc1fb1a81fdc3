"""fMoE, figures 9 to 13: the numbers that its text gives (sections 6.2 to 6.6)."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from benchmarks.papers.cells import CellFigures, ReplayTable, hit_rate, mean, ratios
from benchmarks.papers.claims import Comparison
from benchmarks.papers.paper_context import (
    experts_bytes,
    load_hardware,
    load_shape,
    load_system,
)
from runtime.config import HardwareConfig, SystemConfig

PAPER = "fmoe"
SHAPES = ("mixtral-8x7b", "qwen1.5-moe", "phi-3.5-moe")
"""Table 1."""
BASELINES = ("on-demand", "mixtral-offloading", "promoe", "moe-infinity-request")
"""Section 6.1: DeepSpeed is "pure on-demand loading" with a cache, MoE-Infinity keeps request-level
patterns."""
SHARE = 0.25
"""Cache limit of figures 9, 10, 12 and 13: the text gives none."""
SMALL_SHARE = 0.1
LIMIT_BYTES = 6e9
"""Cache limit of figure 11."""
SHARED_CODE = (
    "baselines in fmoe's code: its misses, transfers and shared cache, promoe with skip two layers "
    "ahead (6.1); they wait for their predictors (4.3)"
)
SLOW_SEARCH_US = 800.0
"""About ten times what it takes here."""


def machine() -> HardwareConfig:
    return load_hardware("rtx3090-pcie4")


def in_shared_code(system: SystemConfig) -> SystemConfig:
    """Returns the system as fMoE's authors ran it: in one code base, with synchronous predictors.

    ProMoE's code was not public: theirs is "a prototype of ProMoE on top of MoE-Infinity", which
    speculates with the stride of ProMoE (fMoE, section 6.1).
    """
    fmoe = load_system("fmoe")
    if system.name == "promoe":
        system = replace(system, predictor="skip", predictor_options={"horizon": 2})
    return replace(
        system,
        chunked=fmoe.chunked,
        early_preemption=fmoe.early_preemption,
        reordered=fmoe.reordered,
        per_layer=fmoe.per_layer,
        synchronous=system.prefetch,
    )


def list_systems() -> tuple[dict[str, SystemConfig], dict[str, SystemConfig]]:
    """Returns fMoE and the baselines, and the same in shared code."""
    systems = {name: load_system(name) for name in ("fmoe", *BASELINES)}
    shared = {name: in_shared_code(system) for name, system in systems.items()}
    return systems, {**shared, "fmoe": systems["fmoe"]}


def replay_all(
    table: ReplayTable, systems: Mapping[str, SystemConfig], share: float = SHARE
) -> dict[str, list[CellFigures]]:
    """Replays each system on every shape."""
    return table.replay_all(systems, map(load_shape, SHAPES), machine(), shares=[share])


def describe_basis(table: ReplayTable) -> str:
    return table.describe_basis([load_shape(shape) for shape in SHAPES])


def saved(cells: Mapping[str, list[CellFigures]], base: str, key: str) -> Any:
    """Returns the share of a baseline's time that fMoE saves."""
    return 1 - mean(ratios(cells[base], cells["fmoe"], key))


def figures_9_10(table: ReplayTable) -> Iterator[Comparison]:
    systems, shared = list_systems()
    cells, changed = replay_all(table, systems), replay_all(table, shared)
    smaller = replay_all(table, systems, SMALL_SHARE)
    basis = describe_basis(table)
    for phase, key in (("ttft", "ttft_seconds"), ("tpot", "tpot_seconds")):
        for name in BASELINES:
            yield Comparison(
                f"figure-9/{phase}/{name}",
                saved(cells, name, key),
                basis=basis,
                change=SHARED_CODE,
                changed=saved(changed, name, key),
            )
    for name in BASELINES:
        yield Comparison(
            f"figure-9/hits/{name}",
            hit_rate(cells["fmoe"]) / hit_rate(cells[name]) - 1,
            basis=basis,
            change=f"room for {SMALL_SHARE:.0%} of the experts in place of {SHARE:.0%}",
            changed=hit_rate(smaller["fmoe"]) / hit_rate(smaller[name]) - 1,
        )
    yield Comparison(
        "figure-10/first",
        fastest_requests(cells),
        basis=basis,
        change=SHARED_CODE,
        changed=fastest_requests(changed),
    )


def fastest_requests(cells: Mapping[str, list[CellFigures]]) -> str:
    """Returns the system with the least time for a prompt and 100 tokens, mean of the shapes."""
    seconds = {
        name: float(mean(cell.ttft_seconds + 100 * cell.tpot_seconds for cell in row).mean())
        for name, row in cells.items()
    }
    return min(seconds, key=lambda name: seconds[name])


def figure_11(table: ReplayTable) -> Iterator[Comparison]:
    cells, changed = (
        {
            name: [
                table.replay(
                    system, shape, machine(), share=min(1.0, LIMIT_BYTES / experts_bytes(shape))
                )
                for shape in map(load_shape, SHAPES)
            ]
            for name, system in systems.items()
        }
        for systems in list_systems()
    )
    for name in BASELINES:
        yield Comparison(
            f"figure-11/{name}",
            saved(cells, name, "tpot_seconds"),
            basis=describe_basis(table),
            change=SHARED_CODE,
            changed=saved(changed, name, "tpot_seconds"),
        )


def rank(cells: Mapping[str, list[CellFigures]]) -> str:
    """Returns the variants with their mean hit rates, the lowest first."""
    rates = {title: float(hit_rate(row).mean()) for title, row in cells.items()}
    ranked = sorted(rates, key=lambda title: rates[title])
    return " < ".join(f"{title} ({rates[title]:.3f})" for title in ranked)


def figure_12(table: ReplayTable) -> Iterator[Comparison]:
    """Compares ranks, which is what the paper's text gives."""
    fmoe = load_system("fmoe")
    options = fmoe.predictor_options
    trackers = {
        "Speculate": replace(fmoe, predictor="skip", predictor_options={"horizon": 3}),
        "Hit count": replace(fmoe, predictor="eam-request"),
        "Map (T)": replace(
            fmoe, predictor_options={**options, "semantic": False, "dynamic": False}
        ),
        "Map (T+S)": replace(fmoe, predictor_options={**options, "dynamic": False}),
        "Map (T+S+delta)": fmoe,
    }
    caches = {
        "LRU": replace(fmoe, eviction="lru", eviction_options={}),
        "LFU": replace(fmoe, eviction="lfu", eviction_options={}),
        "fMoE": fmoe,
    }
    basis = describe_basis(table)
    tracked = replay_all(table, trackers)
    yield Comparison("figure-12a/worst", rank(tracked), basis=basis)
    maps = {title: row for title, row in tracked.items() if title.startswith("Map")}
    yield Comparison("figure-12a/arms", rank(maps), basis=basis)
    cached = replay_all(table, caches)
    yield Comparison("figure-12b/order", rank(cached), basis=basis)


def figure_13(table: ReplayTable) -> Iterator[Comparison]:
    best = []
    slow = replace(machine(), predictor_kind="expert-map", predictor_us=SLOW_SEARCH_US)
    for hardware in (machine(), slow):
        means = {}
        for distance in range(1, 7):
            fmoe = load_system("fmoe")
            options = {**fmoe.predictor_options, "distance": distance}
            system = replace(fmoe, name=f"d={distance}", predictor_options=options)
            means[distance] = mean(
                table.replay(system, load_shape(shape), hardware, share=SHARE).tpot_seconds
                for shape in SHAPES
            )
        best.append(float(min(means, key=lambda distance: float(means[distance].mean()))))
    yield Comparison(
        "figure-13/best",
        best[0],
        basis=describe_basis(table),
        change=f"a search takes {SLOW_SEARCH_US:.0f} us",
        changed=best[1],
    )


FIGURES = (figures_9_10, figure_11, figure_12, figure_13)
