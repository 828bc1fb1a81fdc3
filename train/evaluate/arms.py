"""From the configuration to the arms that are replayed, and why others are not."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from collect.traces import Trace
from runtime.config import SystemConfig
from train.baselines import chosen_columns
from train.evaluate.cells import Arm, ablation_arms, distance_arms
from train.evaluate.config import EvaluateConfig
from train.evaluate.sources import Missing, Sources

FORECAST: tuple[tuple[str, str, Mapping[str, Any], int], ...] = (
    ("skip", "skip", {"horizon": 1}, 1),
    ("skip", "skip", {"horizon": 2}, 2),
    ("skip", "skip", {"horizon": 3}, 3),
    ("mlp, stride", "mlp", {}, 1),
    ("mlp, stride", "stride", {}, 2),
    ("residual", "residual", {}, 1),
    ("residual", "residual", {}, 2),
    ("residual", "residual", {}, 3),
)
"""Line, kind, options and layers ahead of the figure of distances."""


@dataclass(frozen=True)
class Arms:
    """What is replayed, by the part of the report that it is for."""

    table: list[Arm]
    ablation: list[Arm]
    distance: list[Arm]
    missing: dict[str, str]
    """System, or part of one, to the reason why it cannot be replayed on this trace."""

    def named(self, name: str) -> Arm | None:
        """The arm of one system of the table."""
        return next((arm for arm in self.table if arm.label == name), None)


def arms_of(config: EvaluateConfig, sources: Sources) -> Arms:
    """The systems asked for, the baseline first and the bound last; then those of the figures.

    Raises:
        ZooError: a predictor that was named is damaged.
        MoecastError: a predictor that was named is not there.
    """
    systems = {config.baseline.name: config.baseline}
    systems |= {one.name: one for one in config.system}
    systems.pop(config.bound.name, None)
    systems[config.bound.name] = config.bound
    table, missing = [], {}
    for name, system in systems.items():
        try:
            predictor, reuse_predictor = sources.systems(system, config.predictor)
        except Missing as error:
            missing[name] = str(error)
            continue
        informed = with_popular(system, sources.trace)
        table.append(
            Arm(label=name, system=informed, predictor=predictor, reuse_predictor=reuse_predictor)
        )
    if not config.figures:
        return Arms(table, [], [], missing | sources.without)
    try:
        predictor, reuse_predictor = sources.systems(config.ablated, config.predictor)
    except Missing as error:
        missing[f"figures of {config.ablated.name}"] = str(error)
        return Arms(table, [], [], missing | sources.without)
    subject = Arm(
        label=config.ablated.name,
        system=config.ablated,
        predictor=predictor,
        reuse_predictor=reuse_predictor,
    )
    distances = distance_arms(subject, forecast_at(sources, missing))
    return Arms(table, ablation_arms(subject), distances, missing | sources.without)


def with_popular(system: SystemConfig, trace: Trace) -> SystemConfig:
    """A fixed set is that of the training requests, where the system names no other: to learn it
    would take the first steps of a replay, which the paper's baseline does not.
    """
    options = system.eviction_options
    if system.eviction != "static" or options.get("counts") or options.get("first_layers"):
        return system
    num_experts = trace.spec.num_experts
    counts = [
        np.bincount(chosen.ravel(), minlength=num_experts)[:num_experts].tolist()
        for chosen in chosen_columns(trace)
    ]
    return replace(system, eviction_options={**options, "counts": counts})


def forecast_at(sources: Sources, missing: dict[str, str]) -> Sequence[tuple[str, str, int]]:
    """Line, key and distance of every predictor of that figure that is here."""
    found = []
    for label, kind, options, ahead in FORECAST:
        try:
            found.append((label, sources.find(kind, options), ahead))
        except Missing as error:
            missing[f"{kind} in the figure of distances"] = str(error)
    return found
