"""Variants that are replayed in each condition, with predictors found in a zoo or counted once."""

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from collect.traces import Trace, TraceSignal
from predictors.base import Predictor
from predictors.registry import load_from_files
from predictors.spec import ModelSpec
from runtime.config import ModelConfig, SystemConfig
from runtime.engine.forecasters import AvailablePredictors
from runtime.presets import load_system
from runtime.sim.hardware import Hardware
from runtime.tools.comparison import Case, Condition, Variant
from train.config import EvaluateConfig
from train.errors import TrainError
from train.kinds import RECORDED
from train.nonlearned import FITS, RouterWeights, count_uses, fit_baseline, make_skip
from zoo.errors import MismatchError
from zoo.manifest import name_entry


@dataclass(frozen=True)
class FoundPredictor:
    """A predictor as plain values: kind, options and files, as in a zoo entry."""

    kind: str
    options: Mapping[str, Any]
    files: Mapping[str, bytes] = field(repr=False)

    @property
    def digest(self) -> str:
        """sha256 over kind, options and files, as hex."""
        whole = hashlib.sha256(json.dumps([self.kind, self.options], sort_keys=True).encode())
        for name, content in sorted(self.files.items()):
            whole.update(name.encode())
            whole.update(hashlib.sha256(content).digest())
        return whole.hexdigest()

    def load(self, spec: ModelSpec) -> Predictor:
        """Return the predictor as it is before the first step."""
        return load_from_files(self.kind, spec, files=self.files, options=self.options)


class MissingPredictor(TrainError):
    """A system cannot be replayed on this trace."""


class PredictorSources:
    """Finds predictors by the names that systems give them, each of them once.

    Zoo entries in the folder `entries` come first, then the zoo's for this model. Predictors that
    need no training are counted on the trace's training requests. `model` is None if it is not on
    this machine; skip copies its routers.
    """

    def __init__(self, trace: Trace, *, model: ModelConfig | None, entries: Path | None, seed: int):
        self.trace = trace
        self._model = model
        self._routers = None if model is None else RouterWeights(model, trace.spec)
        self._entries = entries
        self._seed = seed
        self.found: dict[str, FoundPredictor] = {}
        """By the key that `find` returns."""
        self.without: dict[str, str] = {}
        """Missing predictors without which their systems are replayed, and why."""

    def of_system(self, system: SystemConfig, chosen: str | None) -> tuple[str | None, str | None]:
        """Return the keys of the system's predictor, or of `chosen` instead, and reuse predictor.

        Raises:
            MissingPredictor: the predictor is not found and cannot be counted on this trace.
            ZooError: a named entry is damaged.
        """
        what, options = system.predictor, system.predictor_options
        if chosen is not None:
            what, options = chosen, {}
        predictor = reuse = None
        if system.prefetch:
            if what is None:
                raise MissingPredictor(
                    f"system {system.name} prefetches and names no predictor: give predictor=KIND"
                )
            predictor = (
                self._find_or_do_without(
                    system, what, options, fallback=system.fallback, without="it fetches on demand"
                )
                if system.fallback and what == system.predictor
                else self.find(what, options)
            )
        if system.reuse_predictor is not None:
            reuse = self._find_or_do_without(
                system, system.reuse_predictor, {}, without="eviction uses its own counts"
            )
        return predictor, reuse

    def _find_or_do_without(
        self,
        system: SystemConfig,
        what: str,
        options: Mapping[str, Any],
        *,
        fallback: Mapping[str, Any] = MappingProxyType({}),
        without: str,
    ) -> str | None:
        """Return the key of the predictor or, as live, of the first fallback that works."""
        try:
            return self.find(what, options)
        except MissingPredictor as error:
            reason = str(error)
        key = None
        for kind, kind_options in fallback.items():
            with contextlib.suppress(MissingPredictor):
                key, without = self.find(kind, kind_options), f"it forecasts with {kind}"
                break
        self.without[f"{what} of {system.name}"] = f"{reason}; {without} instead"
        return key

    def find(self, what: str, options: Mapping[str, Any]) -> str:
        """Return the key of the predictor in `found`; raises as `of_system`."""
        key = what if not options else f"{what} {json.dumps(options, sort_keys=True)}"
        if key not in self.found:
            predictor = self._look(what, options)
            recorded = {RECORDED[signal] for signal in predictor.signals}
            missing = sorted(map(str, recorded - {None, *self.trace.signals}))
            if missing:
                listed = ", ".join(missing)
                raise MissingPredictor(f"{what} needs {listed}; the trace does not contain them")
            self.found[key] = FoundPredictor(predictor.kind, predictor.options(), predictor.files())
        return key

    def _look(self, what: str, options: Mapping[str, Any]) -> Predictor:
        spec = self.trace.spec
        name = spec.model_id if self._model is None else self._model.name
        try:
            made = AvailablePredictors(
                spec=spec,
                name=name,
                entries=self._entries,
                makers={kind: partial(self._make, kind) for kind in (*FITS, "skip")},
            ).load(what, options)
        except MismatchError as error:
            raise MissingPredictor(f"{what}: {error}") from error
        if made is None:
            raise MissingPredictor(
                f"there is no zoo entry {name_entry(name, what)}, and it cannot be counted from a "
                "trace: `moecast train` makes one, entries=FOLDER names where"
            )
        return made

    def _make(self, kind: str, given: Mapping[str, Any]) -> Predictor | None:
        own = {name: value for name, value in given.items() if name != "spec"}
        if kind == "skip":
            return make_skip(self._routers, own.get("horizon", 1)) if self._routers else None
        needed = {TraceSignal.LAYER_INPUT, TraceSignal.GATE_LOGITS}
        if kind == "expert-map" and not needed <= set(self.trace.signals):
            raise MissingPredictor(f"{kind} needs hidden states; the trace contains none")
        return fit_baseline(kind, self.trace, own, seed=self._seed)


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
    oracle = load_system("oracle")
    for machine in machines if config.figures else ():
        for budget in config.budget:
            for known in KNOWN_STEPS:
                system = replace(oracle, eviction_options={"known_steps": known})
                variant = Variant(label="all" if known is None else str(known), system=system)
                yield ReplayCase(variant, Condition(budget, config.batches[0]), machine, KNOWN)


def figure_condition(config: EvaluateConfig) -> Condition:
    """Return the condition of figures that show only one.

    The budget is 50 % if it is configured, else the middle one; the batch is the smallest.
    """
    middle = config.budget[len(config.budget) // 2]
    return Condition("50%" if "50%" in config.budget else middle, config.batches[0])
