"""Variants that are replayed, and each of them on every machine, budget and batch size."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from collect.traces import Trace
from runtime.config import SystemConfig
from runtime.presets import load_system
from runtime.sim.hardware import Hardware
from runtime.tools.comparison import Case, Condition, Variant
from train.evaluate.config import EvaluateConfig
from train.evaluate.sources import MissingPredictor, PredictorSources
from train.nonlearned import chosen_columns

TABLE, ABLATION, DISTANCE, KNOWN = "table", "ablation", "distance", "known"
"""Parts of the report."""

TRUTH = "truth"
"""Key of forecasts that equal the routing, in the figure of prefetch distances."""

NO_PREFETCH = "no prefetching"
"""Label of the ablated system without forecasts in that figure."""

KNOWN_STEPS: tuple[int | None, ...] = (1, 2, 4, 8, None)
"""Decode steps whose routing the oracle knows, the present one included; None: all."""

MAX_DISTANCE = 6
"""Layers ahead up to which the figure shows perfect forecasts."""

DISTANCE_LINES: tuple[tuple[str, str, Mapping[str, Any], int], ...] = (
    ("skip", "skip", {"horizon": 1}, 1),
    ("skip", "skip", {"horizon": 2}, 2),
    ("skip", "skip", {"horizon": 3}, 3),
    ("mlp, stride", "mlp", {}, 1),
    ("mlp, stride", "stride", {}, 2),
    ("residual", "residual", {}, 1),
    ("residual", "residual", {}, 2),
    ("residual", "residual", {}, 3),
)
"""Line, kind, options and layers ahead of the predictors in that figure."""


@dataclass(frozen=True)
class ReplayCase(Case):
    """A variant in a condition on a simulated machine, for one part of the report."""

    hardware: Hardware
    part: str

    def digest(self, *others: str) -> str:
        """Return the sha256 of everything that decides the figures, as hex.

        `others` identify the steps, the forecasts and the code.
        """
        settings = [json.loads(json.dumps(asdict(self), default=str)), *others]
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def list_variants(
    config: EvaluateConfig, sources: PredictorSources
) -> tuple[dict[str, list[Variant]], dict[str, str]]:
    """Return the variants by the part of the report that they are for, and what is missing.

    The table has the systems, the baseline first, the oracle last. What is missing is a system, or
    part of one, with the reason why it cannot be replayed on this trace.

    Raises:
        ZooError: a named predictor is damaged.
        MoecastError: a named predictor does not exist.
    """
    systems = {config.baseline.name: config.baseline}
    systems |= {system.name: system for system in config.system}
    by_knowledge = sorted(systems.items(), key=lambda item: item[1].knows_future)
    parts: dict[str, list[Variant]] = {part: [] for part in (TABLE, ABLATION, DISTANCE, KNOWN)}
    missing: dict[str, str] = {}
    for name, system in by_knowledge:
        try:
            variant = make_variant(system, sources, config.predictor)
        except MissingPredictor as error:
            missing[name] = str(error)
        else:
            system = with_popular_experts(system, sources.trace)
            parts[TABLE].append(replace(variant, system=system))
    if config.figures:
        parts[KNOWN] = known_variants()
        try:
            ablated = make_variant(config.ablated, sources, config.predictor)
        except MissingPredictor as error:
            missing[f"figures of {config.ablated.name}"] = str(error)
        else:
            parts[ABLATION] = ablation_variants(ablated)
            parts[DISTANCE] = distance_variants(ablated, find_distance_lines(sources, missing))
    return parts, missing | sources.without


def known_variants() -> list[Variant]:
    """Return the oracle with more and more of the coming routing known."""
    oracle = load_system("oracle")
    return [
        Variant(
            label="all" if known is None else str(known),
            system=replace(oracle, eviction_options={"known_steps": known}),
        )
        for known in KNOWN_STEPS
    ]


def make_variant(system: SystemConfig, sources: PredictorSources, chosen: str | None) -> Variant:
    """Return a system with its predictors; `chosen` replaces the system's predictor if given."""
    predictor, reuse_predictor = sources.of_system(system, chosen)
    return Variant(
        label=system.name, system=system, predictor=predictor, reuse_predictor=reuse_predictor
    )


def with_popular_experts(system: SystemConfig, trace: Trace) -> SystemConfig:
    """Give a static system the experts that the training requests chose most.

    Otherwise it would learn them in the first steps of a replay, unlike the papers' baseline.
    """
    options = system.eviction_options
    if system.eviction != "static" or options.get("counts"):
        return system
    num_experts = trace.spec.num_experts
    counts = [
        np.bincount(chosen.ravel(), minlength=num_experts)[:num_experts].tolist()
        for chosen in chosen_columns(trace)
    ]
    return replace(system, eviction_options={**options, "counts": counts})


def find_distance_lines(
    sources: PredictorSources, missing: dict[str, str]
) -> list[tuple[str, str, int]]:
    """Return line, key and layers ahead of the available predictors; adds to `missing`."""
    lines = []
    for label, kind, options, ahead in DISTANCE_LINES:
        try:
            lines.append((label, sources.find(kind, options), ahead))
        except MissingPredictor as error:
            missing[f"{kind} in the figure of distances"] = str(error)
    return lines


def ablation_variants(subject: Variant) -> list[Variant]:
    """Add the subject's techniques one after another, as in ProMoE, figure 12."""
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
    variants: list[Variant] = []
    switches: dict[str, Any] = {}
    for label, added in stages:
        switches.update(added)
        system = replace(bare, **switches)
        predictor = subject.predictor if system.prefetch else None
        variants.append(replace(subject, label=label, system=system, predictor=predictor))
    return variants


def distance_variants(
    subject: Variant, predictors: Sequence[tuple[str, str, int]]
) -> list[Variant]:
    """Return the subject without forecasts, then with those of one distance alone.

    The forecasts are the routing itself, and those of each predictor `(label, key, layers
    ahead)`.
    """
    perfect = [(TRUTH, TRUTH, ahead) for ahead in range(1, MAX_DISTANCE + 1)]
    system = replace(subject.system, prefetch=False)
    without = replace(subject, label=NO_PREFETCH, system=system, predictor=None, distance=0)
    return [without] + [
        replace(subject, label=label, predictor=key, distance=ahead)
        for label, key, ahead in [*perfect, *predictors]
    ]


def list_cases(
    config: EvaluateConfig, variants: Mapping[str, list[Variant]], machines: Sequence[Hardware]
) -> Iterator[ReplayCase]:
    """Yield the cases of the table, then those of the figures."""
    for batch in config.batches:
        for machine in machines:
            for budget in config.budget:
                for variant in variants[TABLE]:
                    yield ReplayCase(variant, Condition(budget, batch), machine, TABLE)
    for part in (ABLATION, DISTANCE):
        for machine in machines:
            for variant in variants[part]:
                yield ReplayCase(variant, figure_condition(config), machine, part)
    for machine in machines:
        for budget in config.budget:
            for variant in variants[KNOWN]:
                yield ReplayCase(variant, Condition(budget, config.batches[0]), machine, KNOWN)


def figure_condition(config: EvaluateConfig) -> Condition:
    """Return the condition of figures that show only one.

    The budget is 50 % if it is configured, else the middle one; the batch is the smallest.
    """
    middle = config.budget[len(config.budget) // 2]
    return Condition("50%" if "50%" in config.budget else middle, config.batches[0])
