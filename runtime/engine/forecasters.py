"""Loads the predictors that a system names: from a kind, a zoo entry or a folder.

For a kind such as `stride`, it is the zoo's entry of that kind for this model, if there is one.
"""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from predictors.base import Predictor
from predictors.errors import MoecastError
from predictors.spec import ModelSpec
from runtime.config import ORACLE, SystemConfig

log = logging.getLogger(__name__)

PredictorMakers = Mapping[str, Callable[[Mapping[str, Any]], Predictor | None]]
"""Constructors, by kind, of predictors without an entry. They get the options, and return None if
the model does not allow such a predictor."""


def locate_predictor(
    what: str | Path, identity: Mapping[str, str], *, name: str, entries: Path | None = None
) -> str | Path | None:
    """Return the name or the folder of a predictor; None for a kind without an entry.

    Args:
        what: a kind, an entry's name or a folder.
        identity: `ModelSpec.identity` of the model.
        name: name of the model.
        entries: folder of entries by kind, as `moecast train` writes; searched before the zoo.
    """
    from predictors.registry import KINDS, REUSE_PREDICTORS
    from zoo.load import find_name

    if str(what) not in {*KINDS, *REUSE_PREDICTORS}:
        return what
    if entries is not None and (entries / str(what)).is_dir():
        return entries / str(what)
    return find_name(str(what), identity, model=name)


def load_forecaster(
    what: str | Path,
    spec: ModelSpec,
    *,
    name: str,
    options: Mapping[str, Any] | None = None,
    entries: Path | None = None,
    makers: PredictorMakers | None = None,
) -> Predictor | None:
    """Load a predictor, with `options` in place of the entry's.

    Returns None for a kind without an entry for this model that cannot be constructed either.

    Raises:
        ZooError: a named entry or folder is not there, damaged or for another model.
    """
    from zoo.load import load_predictor

    where = locate_predictor(what, spec.identity, name=name, entries=entries)
    if where is not None:
        return load_predictor(where, spec=spec, options=options)
    make = {**FROM_NOTHING, **(makers or {})}.get(str(what))
    return None if make is None else make({"spec": spec, **(options or {})})


def _dependency(given: Mapping[str, Any]) -> Predictor:
    from predictors.baselines import DependencyPredictor

    return DependencyPredictor(**given)


def _correlation(given: Mapping[str, Any]) -> Predictor:
    from predictors.correlation import CorrelationPredictor

    return CorrelationPredictor.empty(**given)


FROM_NOTHING: PredictorMakers = {"dependency": _dependency, "correlation": _correlation}
"""Kinds that need only the model's shape. A correlation table fills while serving (Klotski, section
4: "if the MoE model is performed for the first time")."""


def load_system_predictor(
    system: SystemConfig,
    spec: ModelSpec,
    *,
    name: str,
    chosen: str | Path | None = None,
    entries: Path | None = None,
    makers: PredictorMakers | None = None,
) -> Predictor | None:
    """Load the predictor `chosen`, or else the one that the system names.

    Where the system names a kind without an entry for this model, logs a warning and returns the
    system's fallback, or None without one, so that the system serves on demand.

    Raises:
        MoecastError: the system is a bound for replays only.
        ZooError: a named entry or folder cannot be used.
    """
    if system.predictor == ORACLE:
        raise MoecastError(
            f"system {system.name} knows the future routing: it is for replays of a trace "
            "(moecast evaluate). Live, choose another system"
        )
    what = chosen if chosen is not None else system.predictor if system.prefetch else None
    if what is None:
        return None
    # Imported here because the zoo takes 10 MiB, which serving on demand does not need.
    from zoo.errors import MismatchError
    from zoo.load import find_entry
    from zoo.manifest import name_entry

    options = system.predictor_options if what == system.predictor else None
    reason = describe_missing(what, name)
    try:
        predictor = load_forecaster(
            what, spec, name=name, options=options, entries=entries, makers=makers
        )
    except MismatchError as error:
        if chosen is not None:
            raise
        predictor, reason = None, str(error)
    if predictor is not None:
        return predictor
    if chosen is not None:
        # The user named this predictor: raise an error that lists the entries.
        find_entry(name_entry(name, str(what)))
    if system.fallback is not None:
        predictor = load_forecaster(
            system.fallback, spec, name=name, entries=entries, makers=makers
        )
    consequence = "serves on demand" if predictor is None else f"forecasts with {system.fallback}"
    log.warning("system %s %s: %s", system.name, consequence, reason)
    return predictor


def load_reuse_predictor(
    system: SystemConfig, spec: ModelSpec, *, name: str, entries: Path | None = None
) -> Predictor | None:
    """Load the reuse predictor that the system names, if it names one.

    Logs a warning and returns None, so that eviction uses its own counts, where it names a kind
    without an entry for this model.
    """
    if system.reuse_predictor is None:
        return None
    from zoo.errors import MismatchError

    reason = describe_missing(system.reuse_predictor, name)
    try:
        predictor = load_forecaster(system.reuse_predictor, spec, name=name, entries=entries)
    except MismatchError as error:
        predictor, reason = None, str(error)
    if predictor is None:
        log.warning("system %s evicts by usage counts: %s", system.name, reason)
    return predictor


def describe_missing(kind: str | Path, name: str) -> str:
    from zoo.manifest import name_entry

    return (
        f"there is no zoo entry {name_entry(name, str(kind))}. Train one with `moecast train`, or "
        "name another with predictor=NAME or predictor=FOLDER"
    )
