"""What is compared: systems, each at every budget and batch size."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from runtime.config import ORACLE, SystemConfig
from runtime.systems import ON_DEMAND, PROMOE, load_system
from runtime.tools.bench.config import BenchConfig

ABLATIONS: dict[str, Any] = {
    "promoe without chunks": {"chunked": False},
    "promoe without early preemption": {"early_preemption": False},
    "promoe without reordering": {"reordered": False},
}
"""promoe figure 12: each technique has a switch."""


@dataclass(frozen=True)
class Cell:
    """Where systems are compared: all of them have this much memory and this much to do."""

    budget: str
    batch: int


@dataclass(frozen=True)
class Arm:
    """A system in a cell."""

    system: SystemConfig
    cell: Cell

    def __str__(self) -> str:
        return f"{self.system.name}, budget {self.cell.budget}, batch {self.cell.batch}"


def is_bound(system: SystemConfig) -> bool:
    """Whether it knows the future: it can be replayed, and not run."""
    return system.predictor == ORACLE or system.eviction == "belady"


def cells_of(config: BenchConfig) -> list[Cell]:
    """Every budget at every batch size."""
    return [Cell(budget, batch) for batch in config.batch for budget in config.budget]


def systems_of(config: BenchConfig) -> list[SystemConfig]:
    """What runs live: what was asked for, the ablations, and in any case the no-prefetch arm."""
    live = [system for system in config.system if not is_bound(system)]
    names = {system.name for system in live}
    if ON_DEMAND not in names:
        live.insert(0, load_system(ON_DEMAND))
    if config.ablation:
        if PROMOE not in names:
            live.append(load_system(PROMOE))
        whole = next(system for system in live if system.name == PROMOE)
        live += [replace(whole, name=name, **off) for name, off in ABLATIONS.items()]
    return live


def arms_of(config: BenchConfig) -> list[Arm]:
    """Everything that runs live, cell by cell."""
    return [Arm(system, cell) for cell in cells_of(config) for system in systems_of(config)]


def bounds_of(systems: Iterable[SystemConfig]) -> list[SystemConfig]:
    """What is replayed."""
    return [system for system in systems if is_bound(system)]
