"""Loads the predictors that a system names: from a kind, a zoo entry or a folder.

For a kind such as `stride`, the zoo entry is `MODEL_NAME/stride`, if there is one.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
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
    what: str | Path, names: Sequence[str], *, entries: Path | None = None
) -> tuple[str | Path, bool]:
    """Return the place of a predictor, and whether it exists.

    Args:
        what: a kind, an entry's name or a folder.
        names: names of the model; the first with an entry of that kind is used.
        entries: folder of entries by kind, as `python -m train` writes; searched before the zoo.
    """
    from predictors.registry import KINDS, REUSE_PREDICTORS
    from zoo.load import list_names

    if str(what) not in {*KINDS, *REUSE_PREDICTORS}:
        return what, True
    if entries is not None and (entries / str(what)).is_dir():
        return entries / str(what), True
    known = list_names()
    for name in names:
        if f"{name}/{what}" in known:
            return f"{name}/{what}", True
    return f"{names[0]}/{what}", False


def list_model_names(name: str, spec: ModelSpec) -> list[str]:
    return list(dict.fromkeys((name, spec.model_id)))


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
        ZooError: a named entry or folder is not there, damaged or predictor for another model.
    """
    from zoo.load import load_predictor

    where, exists = locate_predictor(what, list_model_names(name, spec), entries=entries)
    if exists:
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

    Logs a warning and returns None, so that the system serves on demand, where the system names a
    kind without an entry for this model.

    Raises:
        MoecastError: the system is a bound for replays only.
        ZooError: a named entry or folder cannot be used.
    """
    if system.predictor == ORACLE:
        raise MoecastError(
            f"system {system.name} knows the future routing: it is for replays of a trace "
            "(python -m train.evaluate). Live, choose another system"
        )
    what = chosen if chosen is not None else system.predictor if system.prefetch else None
    if what is None:
        return None
    # Imported here because the zoo takes 10 MiB, which serving on demand does not need.
    from zoo.errors import MismatchError
    from zoo.load import find_entry

    options = system.predictor_options if what == system.predictor else None
    try:
        predictor = load_forecaster(
            what, spec, name=name, options=options, entries=entries, makers=makers
        )
    except MismatchError as error:
        if chosen is not None:
            raise
        log.warning("system %s serves on demand: %s", system.name, error)
        return None
    if predictor is None and chosen is not None:
        # The user named this predictor: raise an error that lists the entries.
        find_entry(f"{name}/{what}")
    if predictor is None and system.fallback is not None:
        predictor = load_forecaster(
            system.fallback, spec, name=name, entries=entries, makers=makers
        )
        if predictor is not None:
            _warn_missing(f"system {system.name} forecasts with {system.fallback}", what, name)
    if predictor is None:
        _warn_missing(f"system {system.name} serves on demand", what, name)
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
    predictor = load_forecaster(system.reuse_predictor, spec, name=name, entries=entries)
    if predictor is None:
        _warn_missing(f"system {system.name} keeps by usage counts", system.reuse_predictor, name)
    return predictor


def _warn_missing(consequence: str, kind: str | Path, name: str) -> None:
    log.warning(
        "%s: there is no zoo entry %s/%s. Train one with `python -m train`, or name another with "
        "predictor=NAME or predictor=FOLDER",
        consequence,
        name,
        kind,
    )
