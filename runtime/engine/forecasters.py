"""Loads the predictors that a system names, and keeps what they learn while it serves.

A name is a kind, a zoo entry or a folder. For a kind such as `stride`, it is the zoo's entry of
that kind for this model, if there is one.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from predictors.base import Predictor, Signal, check_options
from predictors.errors import DiskFullError, MoecastError, PredictorError
from predictors.spec import ModelSpec
from runtime.config import ModelConfig, SystemConfig
from runtime.presets import describe_choice

log = logging.getLogger(__name__)

STATE_SIGNALS = frozenset({Signal.LAYER_INPUT, Signal.GATE_INPUT, Signal.LOGITS})
"""Signals that have nothing to do with the routing where a log forces it."""

SAVE_SECONDS = 600.0
"""Time between two saves while serving: what a crash may lose."""

PredictorMakers = Mapping[str, Callable[[Mapping[str, Any]], Predictor | None]]
"""Constructors, by kind, of predictors without an entry. They get the options, and return None if
the model does not allow such a predictor."""


def locate_predictor(
    what: str | Path,
    identity: Mapping[str, str],
    *,
    name: str,
    entries: Path | None = None,
    spec: ModelSpec | None = None,
) -> str | Path | None:
    """Return the name or the folder of a predictor; None for a kind without an entry.

    Args:
        what: a kind, an entry's name or a folder.
        identity: `ModelSpec.identity` of the model.
        name: name of the model.
        entries: folder of entries by kind, as `moecast train` writes; searched before the zoo.
        spec: the whole model, to find entries of the model that it is a quantisation of as well.
    """
    from predictors.registry import KINDS, REUSE_PREDICTORS
    from zoo.load import find_name

    if str(what) not in {*KINDS, *REUSE_PREDICTORS}:
        return what
    if entries is not None and (entries / str(what)).is_dir():
        return entries / str(what)
    return find_name(str(what), identity, model=name, spec=spec)


def _dependency(given: Mapping[str, Any]) -> Predictor:
    from predictors.baselines import DependencyPredictor

    return DependencyPredictor(**given)


def _correlation(given: Mapping[str, Any]) -> Predictor:
    from predictors.correlation import CorrelationPredictor

    return CorrelationPredictor.empty(**given)


FROM_NOTHING: PredictorMakers = {"dependency": _dependency, "correlation": _correlation}
"""Kinds that need only the model's shape. A correlation table fills while serving (Klotski, section
4: "if the MoE model is performed for the first time")."""


@dataclass(frozen=True, kw_only=True)
class SystemPredictors:
    """The predictors of a system that serves."""

    forecast: Predictor | None = None
    """None: experts are served on demand."""
    reuse: Predictor | None = None
    """None: eviction uses its own counts."""


@dataclass(frozen=True, kw_only=True)
class AvailablePredictors:
    """The predictors that there are for one model."""

    spec: ModelSpec
    name: str
    """Name of the model."""
    entries: Path | None = None
    """Folder of entries by kind, as `moecast train` writes; searched before the zoo."""
    makers: PredictorMakers = field(default_factory=dict)
    forced_routing: bool = False
    """Whether a log forces the routing, on which the model's states have no bearing."""

    def locate(self, what: str | Path) -> str | Path | None:
        return locate_predictor(
            what, self.spec.identity, name=self.name, entries=self.entries, spec=self.spec
        )

    def load(self, what: str | Path, options: Mapping[str, Any] | None = None) -> Predictor | None:
        """Load a predictor, with `options` in place of the entry's.

        Returns None for a kind without an entry for this model that cannot be constructed either.

        Raises:
            ZooError: a named entry or folder is not there, damaged or for another model.
        """
        from predictors.registry import predictor_class
        from zoo.errors import MismatchError
        from zoo.load import load_predictor

        where, make = self.locate(what), {**FROM_NOTHING, **self.makers}.get(str(what))
        if where is not None:
            try:
                return load_predictor(where, spec=self.spec, options=options)
            except MismatchError:
                # That entry is for another revision, say; one without an entry fits any.
                if make is None:
                    raise
        if make is None:
            return None
        known = check_options(predictor_class(str(what)), options or {})
        return make({"spec": self.spec, **known})

    def load_if_trained(
        self, what: str | Path, options: Mapping[str, Any] | None = None
    ) -> tuple[Predictor | None, str]:
        """Load a predictor as `load`; without an entry for this model, None and the reason.

        The same for one that looks at the model's states, where a log forces the routing.

        Raises:
            ZooError: the entry is damaged.
        """
        from zoo.errors import MismatchError
        from zoo.load import find_entry

        try:
            predictor = self.load(what, options)
        except MismatchError:
            where = self.locate(what)
            assert where is not None
            made_for = find_entry(where).manifest.spec.differences(self.spec)
            values = ", ".join(f"{key} {value}" for key, value in made_for.items())
            return None, f"{where} is for {values}"
        if predictor is not None and not self._fits_routing(predictor):
            return None, f"{what} looks at states, which a forced routing does not depend on"
        return predictor, f"no {what}" + (f" of {self.spec.base}" if self.spec.base else "")

    def _fits_routing(self, predictor: Predictor) -> bool:
        return not (self.forced_routing and predictor.signals & STATE_SIGNALS)

    def load_forecaster(
        self, system: SystemConfig, chosen: str | Path | None = None
    ) -> tuple[Predictor | None, str]:
        """Load the predictor `chosen`, or else the one that the system names.

        Returns the predictor, and what the system does where it names a kind without an entry for
        this model: it uses one of its fallbacks, or serves on demand with None. The text is empty
        otherwise.

        Raises:
            MoecastError: the system is for replays only.
            ZooError: a named entry or folder cannot be used.
        """
        if system.knows_future:
            raise MoecastError(
                f"system {system.name} knows the future routing: it is for replays of a trace "
                "(moecast evaluate). Live, choose another system"
            )
        what = chosen if chosen is not None else system.predictor if system.prefetch else None
        if what is None:
            return None, ""
        options = system.predictor_options if what == system.predictor else None
        if chosen is not None:
            predictor = self.load(what, options)
            if predictor is None:
                # Imported here because the zoo takes 10 MiB, which serving on demand does not need.
                from zoo.load import find_entry
                from zoo.manifest import name_entry

                # The user named this predictor: raise an error that lists the entries.
                find_entry(name_entry(self.name, str(what)))
            return predictor, ""
        predictor, reason = self.load_if_trained(what, options)
        if predictor is not None:
            return predictor, ""
        for kind, kind_options in system.fallback.items():
            predictor = self.load(kind, kind_options)
            if predictor is not None and self._fits_routing(predictor):
                return predictor, f"forecasts with {kind} ({reason})"
        return None, f"serves on demand ({reason})"

    def load_reuse(self, system: SystemConfig) -> tuple[Predictor | None, str]:
        """Load the reuse predictor that the system names, if it names one.

        Returns the predictor, and what eviction does where the system names a kind without an entry
        for this model: it uses its own counts. The text is empty otherwise.
        """
        if system.reuse_predictor is None:
            return None, ""
        predictor, reason = self.load_if_trained(system.reuse_predictor)
        return predictor, "" if predictor is not None else f"evicts by usage counts ({reason})"


def load_system_predictors(
    system: SystemConfig,
    spec: ModelSpec,
    model: ModelConfig,
    *,
    chosen: str | Path | Predictor | None = None,
    entries: Path | None = None,
    makers: PredictorMakers | None = None,
    forced_routing: bool = False,
) -> SystemPredictors:
    """Load the predictors that a system names, or `chosen` in place of its forecasts.

    Where the system names a kind that was not trained for this model, it does without, and one
    warning says what it does instead. The same where a log forces the routing and the kind looks at
    the model's states.

    Raises:
        MoecastError: the system is for replays only.
        ZooError: a named entry or folder cannot be used.
        PredictorError: a run's folder is named that has no entries, or not the system's.
    """
    forecast, entries = choose_predictor(system, chosen, entries)
    source = AvailablePredictors(
        spec=spec,
        name=model.name,
        entries=entries,
        makers=makers or {},
        forced_routing=forced_routing,
    )
    change = ""
    if not isinstance(forecast, Predictor):
        forecast, change = source.load_forecaster(system, forecast)
    reuse, reuse_change = source.load_reuse(system)
    changes = " and ".join(filter(None, (change, reuse_change)))
    if changes and forced_routing:
        log.warning("system %s %s", system.name, changes)
    elif changes:
        log.warning(
            "no trained predictors for %s in %s: system %s %s. To train them: moecast train %s",
            model.name,
            spec.dtype,
            system.name,
            changes,
            describe_choice(model),
        )
    return SystemPredictors(forecast=forecast, reuse=reuse)


def choose_predictor(
    system: SystemConfig, chosen: str | Path | Predictor | None, entries: Path | None
) -> tuple[str | Path | Predictor | None, Path | None]:
    """Return predictor and folder of entries, where a run's folder may stand for either.

    Raises:
        PredictorError: a run's folder that has no entries, or not the system's.
    """
    if isinstance(chosen, Predictor) or (chosen is None and entries is None):
        return chosen, entries
    # Imported here because kinds take memory, which serving on demand does not need.
    from predictors.registry import separate_run

    predictor, entries = separate_run(chosen, entries)
    if predictor is None and chosen is not None:
        require_kind(system, chosen, entries)
    return predictor, entries


def require_predictor(
    system: SystemConfig, chosen: str | Path | Predictor | None, entries: Path | None
) -> None:
    """Refuse a named predictor that is not there, before a model is loaded for it.

    One at an address is looked for when it is loaded.

    Raises:
        ZooError: no such entry or folder.
        PredictorError: as `choose_predictor`.
    """
    named, entries = choose_predictor(system, chosen, entries)
    if isinstance(named, str | Path) and "://" not in str(named):
        from predictors.registry import KINDS, REUSE_PREDICTORS
        from zoo.load import find_entry

        if str(named) not in {*KINDS, *REUSE_PREDICTORS}:
            find_entry(named)


def require_kind(system: SystemConfig, run: str | Path, entries: Path | None) -> None:
    """Raises PredictorError unless a chosen run has the predictor that the system forecasts with.

    Another one of the zoo would take its place, which the user did not name.
    """
    assert entries is not None
    kind = system.predictor
    if system.prefetch and kind is not None and not (entries / kind).is_dir():
        kinds = sorted(path.name for path in entries.iterdir() if path.is_dir())
        raise PredictorError(
            f"predictor={run} has no {kind}, with which system {system.name} forecasts; it has "
            f"{', '.join(kinds)}: name one, as in predictor={entries / kinds[0]}"
        )


class LearnedStore:
    """A folder that holds the predictor as it was when it was last saved, as an entry of a zoo.

    MoE-Infinity (request level), section 5.3: "MoE-Infinity can checkpoint its EAMC [...]. Once
    recovered from the failure, it reloads the EAMC". Every save replaces the folder in one step.

    Args:
        folder: Folder to create; one that is there must be of the same kind and model.
        model: Name of the model.
    """

    def __init__(self, folder: Path, *, model: str):
        self._folder = folder
        self._model = model
        self._saved_at = time.monotonic()
        self._has_changed = False

    def restore(self, predictor: Predictor) -> Predictor:
        """Returns the saved predictor, with the options of `predictor`; that one if none is saved.

        Raises:
            MoecastError: the folder holds a predictor of another kind.
            ZooError: the folder is damaged, is for another model or holds something else.
        """
        from zoo.entry import open_entry
        from zoo.load import load_predictor

        if not self._folder.exists() or not any(self._folder.iterdir()):
            return predictor
        kind = open_entry(self._folder).manifest.kind
        if kind != predictor.kind:
            raise MoecastError(
                f"learned={self._folder}: it was learned by {kind}, the model is served with "
                f"{predictor.kind}. Name another folder"
            )
        restored = load_predictor(self._folder, spec=predictor.spec, options=predictor.options())
        restored.card = predictor.card
        return restored

    def step_ended(self, predictor: Predictor) -> None:
        """Records that the predictor may have learned something; saves it when that is due."""
        self._has_changed = True
        if time.monotonic() - self._saved_at >= SAVE_SECONDS:
            self.save(predictor)

    def save(self, predictor: Predictor) -> None:
        """Saves the predictor between two steps if there was one since the last time."""
        from zoo.entry import write_entry
        from zoo.manifest import name_entry

        if not self._has_changed:
            return
        self._has_changed = False
        self._saved_at = time.monotonic()
        name = name_entry(self._model, predictor.kind)
        try:
            write_entry(self._folder, predictor.as_learned(), name=name)
        except (OSError, DiskFullError) as error:
            log.warning("what the predictor learned was not saved to %s: %s", self._folder, error)
