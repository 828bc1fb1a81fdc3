"""What is replayed: one system on one machine with one budget and batch size is a cell."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from runtime.config import SystemConfig
from runtime.sim.hardware import Hardware

TABLE, ABLATION, DISTANCE = "table", "ablation", "distance"
"""Which part of the report a cell is for."""

TRUTH = "truth"
"""Stands for forecasts that are the routing itself, in the figure of distances."""

WITHOUT = "no prefetching"
"""The subject of that figure without any forecasts."""

FARTHEST = 6
"""Layers ahead up to which the figure of distances goes."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A system, or a variant of one for a figure, and what it is played."""

    label: str
    system: SystemConfig
    predictor: str | None
    """Key of its forecasts; None: it fetches nothing on forecasts."""
    reuse_predictor: str | None = None
    distance: int | None = None
    """Only forecasts so many layers ahead; None: all."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    part: str
    arm: Arm
    hardware: Hardware
    budget: str
    batch: int

    def digest(self, *others: str) -> str:
        """sha256 hex over all that decides its figures.

        `others` name the steps, the forecasts and the code.
        """
        settings = [describe(self), *others]
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def describe(cell: Cell) -> dict[str, Any]:
    """The cell as plain values, the machine's times and the system's settings included."""
    return json.loads(json.dumps(asdict(cell), default=str))


def table_cells(
    arms: Sequence[Arm],
    *,
    machines: Sequence[Hardware],
    budgets: Sequence[str],
    batches: Sequence[int],
) -> Iterator[Cell]:
    """Every arm on every machine with every budget and batch size."""
    for batch in batches:
        for machine in machines:
            for budget in budgets:
                for arm in arms:
                    yield Cell(part=TABLE, arm=arm, hardware=machine, budget=budget, batch=batch)


def figure_cells(
    part: str, arms: Sequence[Arm], *, machines: Sequence[Hardware], budget: str, batch: int
) -> Iterator[Cell]:
    """What one figure needs beside the table, on every machine."""
    for machine in machines:
        for arm in arms:
            yield Cell(part=part, arm=arm, hardware=machine, budget=budget, batch=batch)


def ablation_arms(subject: Arm) -> list[Arm]:
    """ProMoE figure 12: from nothing, the subject's techniques are added one after another."""
    bare = replace(
        subject.system, prefetch=False, chunked=False, early_preemption=False, reordered=False
    )
    stages: list[tuple[str, dict[str, Any]]] = [
        ("base", {}),
        ("+ prefetch", {"prefetch": True}),
        ("+ chunked", {"chunked": True}),
        ("+ early preemption", {"early_preemption": True}),
        ("+ reordered", {"reordered": True}),
    ]
    arms: list[Arm] = []
    switches: dict[str, Any] = {}
    for label, added in stages:
        switches.update(added)
        system = replace(bare, **switches)
        predictor = subject.predictor if system.prefetch else None
        arms.append(replace(subject, label=label, system=system, predictor=predictor))
    return arms


def distance_arms(subject: Arm, predictors: Sequence[tuple[str, str, int]]) -> list[Arm]:
    """The subject without forecasts, and with those of one distance alone: of the routing itself,
    which nothing could forecast better, and of each predictor `(label, key, layers ahead)`.
    """
    true = [(TRUTH, TRUTH, ahead) for ahead in range(1, FARTHEST + 1)]
    system = replace(subject.system, prefetch=False)
    without = replace(subject, label=WITHOUT, system=system, predictor=None, distance=0)
    return [without] + [
        replace(subject, label=label, predictor=key, distance=ahead)
        for label, key, ahead in [*true, *predictors]
    ]
