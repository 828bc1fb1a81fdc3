"""Systems and ablations that the live comparison runs, each at every budget and batch size."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from runtime.config import SystemConfig
from runtime.presets import ON_DEMAND, PROMOE, load_system
from runtime.tools.bench.config import BenchConfig
from runtime.tools.comparison import Case, Condition, Variant

ABLATIONS: dict[str, Any] = {
    "promoe without chunks": {"chunked": False},
    "promoe without early preemption": {"early_preemption": False},
    "promoe without reordering": {"reordered": False},
}
"""Techniques of ProMoE, figure 12, each with a switch."""


def list_conditions(config: BenchConfig) -> list[Condition]:
    """Return every budget at every batch size."""
    return [Condition(budget, batch) for batch in config.batch_size for budget in config.budget]


def live_variants(config: BenchConfig) -> list[Variant]:
    """Return the systems of the configuration, the ablations and, in any case, on-demand."""
    live = {system.name: system for system in config.system if not system.knows_future}
    if ON_DEMAND not in live:
        live = {ON_DEMAND: load_system(ON_DEMAND), **live}
    if config.ablation:
        promoe = live.setdefault(PROMOE, load_system(PROMOE))
        live |= {label: replace(promoe, name=label, **off) for label, off in ABLATIONS.items()}
    return [Variant(label=label, system=system) for label, system in live.items()]


def live_cases(config: BenchConfig) -> list[Case]:
    """Return everything that runs live, condition by condition."""
    return [
        Case(variant, condition)
        for condition in list_conditions(config)
        for variant in live_variants(config)
    ]


def find_replayed(systems: Iterable[SystemConfig]) -> list[SystemConfig]:
    """Return the systems that know the future: they can be replayed, not run."""
    return [system for system in systems if system.knows_future]
