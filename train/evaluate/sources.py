"""What each system forecasts with and keeps by: looked up or counted once, sent to every worker."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from collect.traces import Trace, TraceSignal
from predictors.base import Predictor
from predictors.registry import load_from_files
from predictors.spec import ModelSpec
from runtime.config import ORACLE, ModelConfig, SystemConfig
from runtime.engine.forecasters import load_forecaster
from train.counted import FITS
from train.errors import TrainError
from train.kinds import RECORDED
from zoo.errors import MismatchError


@dataclass(frozen=True)
class Source:
    """A predictor as plain values: kind, options and files, as in a zoo entry."""

    kind: str
    options: Mapping[str, Any]
    files: Mapping[str, bytes] = field(repr=False)

    @property
    def digest(self) -> str:
        """sha256 hex over all of it."""
        whole = hashlib.sha256(json.dumps([self.kind, self.options], sort_keys=True).encode())
        for name, content in sorted(self.files.items()):
            whole.update(name.encode())
            whole.update(hashlib.sha256(content).digest())
        return whole.hexdigest()

    def make(self, spec: ModelSpec) -> Predictor:
        """As it is before the first step."""
        return load_from_files(self.kind, spec, files=self.files, options=self.options)


def source_of(predictor: Predictor) -> Source:
    return Source(predictor.kind, predictor.options(), predictor.files())


class Missing(TrainError):
    """A system that cannot be replayed on this trace; the message says why."""


class Sources:
    """Finds predictors by what systems call them; each is made once.

    Entries given by the user come first, then the zoo's for this model; what needs no training is
    counted on the trace's training requests.

    Args:
        model: the traced one, where it is on this machine: skip is made of its routers.
    """

    def __init__(
        self,
        trace: Trace,
        *,
        model: ModelConfig | None,
        entries: Path | None,
        seed: int,
    ):
        self.trace = trace
        self._model = model
        self._entries = entries
        self._seed = seed
        self.found: dict[str, Source] = {}
        """By the key that `find` returned."""
        self.without: dict[str, str] = {}
        """Keepers that systems are replayed without, and why."""

    def systems(self, system: SystemConfig, chosen: str | None) -> tuple[str | None, str | None]:
        """Keys of what the system forecasts with (`chosen` in its place, if given) and keeps by.

        Raises:
            Missing: one of them is neither here nor to be made of this trace.
            ZooError: a named entry is damaged.
        """
        what, options = system.predictor, system.predictor_options
        if chosen is not None and what != ORACLE:
            what, options = chosen, {}
        if not system.prefetch:
            predictor = None
        elif what is None:
            raise Missing(
                f"system {system.name} prefetches and names no predictor: give predictor=KIND"
            )
        else:
            predictor = what if what == ORACLE else self.find(what, options)
        return predictor, self._keeper(system)

    def _keeper(self, system: SystemConfig) -> str | None:
        """As live: where there is none, the policy goes by what it counts itself."""
        if system.reuse_predictor is None:
            return None
        try:
            return self.find(system.reuse_predictor, {})
        except Missing as error:
            self.without[f"{system.reuse_predictor} of {system.name}"] = (
                f"{error}; it keeps by what it counts itself"
            )
            return None

    def find(self, what: str, options: Mapping[str, Any]) -> str:
        """Key of the predictor in `found`; raises as `systems`."""
        key = what if not options else f"{what} {json.dumps(options, sort_keys=True)}"
        if key not in self.found:
            predictor = self._look(what, options)
            lacking = sorted(set(lacking_signals(predictor, self.trace)))
            if lacking:
                raise Missing(f"{what} needs {', '.join(lacking)}, which the trace has not got")
            self.found[key] = source_of(predictor)
        return key

    def _look(self, what: str, options: Mapping[str, Any]) -> Predictor:
        spec = self.trace.spec
        name = spec.model_id if self._model is None else self._model.name
        try:
            made = load_forecaster(
                what,
                spec,
                name=name,
                options=options,
                entries=self._entries,
                makers={kind: self._maker(kind) for kind in (*FITS, "skip")},
            )
        except MismatchError as error:
            raise Missing(f"{what}: {error}") from error
        if made is None:
            raise Missing(
                f"there is no zoo entry {name}/{what}, and it cannot be counted from a trace: "
                "`python -m train` makes one, entries=FOLDER names where"
            )
        return made

    def _maker(self, kind: str) -> Callable[[Mapping[str, Any]], Predictor | None]:
        def make(given: Mapping[str, Any]) -> Predictor | None:
            own = {name: value for name, value in given.items() if name != "spec"}
            if kind == "skip":
                return self._skip(**own)
            needed = {TraceSignal.LAYER_INPUT, TraceSignal.GATE_LOGITS}
            if kind == "expert-map" and not needed <= set(self.trace.signals):
                raise Missing(f"{kind} needs hidden states, which the trace has not got")
            if kind == "eam-sequence":
                own = {"seed": self._seed, **own}
            return FITS[kind](self.trace, **own)

        return make

    def _skip(self, *, horizon: int = 1) -> Predictor | None:
        if self._model is None:
            return None
        from train.baselines import make_skip

        made = make_skip(self._model, self.trace.spec, horizons=(horizon,))
        return made[0] if made else None


def lacking_signals(predictor: Predictor, trace: Trace) -> Iterator[str]:
    """What the predictor is to be shown and the trace has not recorded."""
    for signal in predictor.signals:
        recorded = RECORDED[signal]
        if recorded is not None and recorded not in trace.signals:
            yield str(recorded)
