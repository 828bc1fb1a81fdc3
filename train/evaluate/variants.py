"""Variants that are replayed, and each of them on every machine, budget and batch size."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from collect.traces import Trace
from runtime.config import SystemConfig
from runtime.presets import load_system
from runtime.sim.hardware import Hardware
from runtime.tools.comparison import Case, Condition, Variant
from train.config import EvaluateConfig
from train.evaluate.sources import MissingPredictor, PredictorSources
from train.nonlearned import count_uses

TABLE, KNOWN = "table", "known"
"""Parts of the report."""

KNOWN_STEPS: tuple[int | None, ...] = (1, 2, 4, 8, None)
"""Decode steps whose routing the oracle knows, the present one included; None: all."""


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
) -> tuple[list[Variant], dict[str, str]]:
    """Return the systems, the baseline first and the oracle last, and what is missing.

    What is missing is a system, or part of one, with the reason why it cannot be replayed.

    Raises:
        ZooError: a named predictor is damaged.
        MoecastError: a named predictor does not exist.
    """
    systems = {config.baseline.name: config.baseline}
    systems |= {system.name: system for system in config.system}
    table: list[Variant] = []
    missing: dict[str, str] = {}
    for name, system in sorted(systems.items(), key=lambda item: item[1].knows_future):
        try:
            variant = make_variant(system, sources, config.predictor)
        except MissingPredictor as error:
            missing[name] = str(error)
        else:
            table.append(replace(variant, system=with_popular_experts(system, sources.trace)))
    return table, missing | sources.without


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
    counts = count_uses(trace).tolist()
    return replace(system, eviction_options={**options, "counts": counts})


def list_cases(
    config: EvaluateConfig, variants: Sequence[Variant], machines: Sequence[Hardware]
) -> Iterator[ReplayCase]:
    """Yield the cases of the table, then those of the figure of known tokens."""
    for batch in config.batches:
        for machine in machines:
            for budget in config.budget:
                for variant in variants:
                    yield ReplayCase(variant, Condition(budget, batch), machine, TABLE)
    for machine in machines if config.figures else ():
        for budget in config.budget:
            for variant in known_variants():
                yield ReplayCase(variant, Condition(budget, config.batches[0]), machine, KNOWN)


def figure_condition(config: EvaluateConfig) -> Condition:
    """Return the condition of figures that show only one.

    The budget is 50 % if it is configured, else the middle one; the batch is the smallest.
    """
    middle = config.budget[len(config.budget) // 2]
    return Condition("50%" if "50%" in config.budget else middle, config.batches[0])
