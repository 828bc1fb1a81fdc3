"""What a system forecasts with, and keeps by: from a kind, a zoo entry or a folder to a predictor.

A system names a kind (`stride`); the model that it serves has an entry of that kind in the zoo,
`MODEL_NAME/KIND`, or none.
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

Makers = Mapping[str, Callable[[Mapping[str, Any]], Predictor | None]]
"""Kinds that need no entry: from their options to one, or None where the model has not got it."""


def reference(
    what: str | Path, names: Sequence[str], *, entries: Path | None = None
) -> tuple[str | Path, bool]:
    """Where the predictor is, and whether anything is there.

    Args:
        what: a kind, an entry's name or a folder.
        names: what the model is called; the first one with an entry of that kind counts.
        entries: folder whose subfolders are looked at before the zoo, as `python -m train` writes.
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


def names_of(name: str, spec: ModelSpec) -> list[str]:
    """What a model may be called in the zoo: its short name; that of the original, if inflated."""
    return list(dict.fromkeys((name, spec.model_id)))


def forecaster(
    what: str | Path,
    spec: ModelSpec,
    *,
    name: str,
    options: Mapping[str, Any] | None = None,
    entries: Path | None = None,
    makers: Makers | None = None,
) -> Predictor | None:
    """The predictor that is meant, with `options` in place of the entry's own.

    None when a kind has no entry for this model and can not be made from nothing either.

    Raises:
        ZooError: a named entry or folder is not there, damaged or made for another model.
    """
    from zoo.load import load_predictor

    where, found = reference(what, names_of(name, spec), entries=entries)
    if found:
        return load_predictor(where, spec=spec, options=options)
    make = {**FROM_NOTHING, **(makers or {})}.get(str(what))
    return None if make is None else make({"spec": spec, **(options or {})})


def _dependency(given: Mapping[str, Any]) -> Predictor:
    from predictors.dependency import DependencyPredictor

    return DependencyPredictor(**given)


def _correlation(given: Mapping[str, Any]) -> Predictor:
    from predictors.correlation import CorrelationPredictor

    return CorrelationPredictor.empty(**given)


FROM_NOTHING: Makers = {"dependency": _dependency, "correlation": _correlation}
"""Kinds that are made of nothing but the model's shape; a correlation table fills while it serves
(klotski 4: "if the MoE model is performed for the first time")."""


def systems_forecaster(
    system: SystemConfig,
    spec: ModelSpec,
    *,
    name: str,
    chosen: str | Path | None = None,
    entries: Path | None = None,
    makers: Makers | None = None,
) -> Predictor | None:
    """What a live system forecasts with: `chosen`, or what the system names.

    Where the system names a kind that has no entry for this model as it is loaded, it serves on
    demand, and says so.

    Raises:
        MoecastError: the system is a bound for replays only.
        ZooError: a named entry or folder can not be used.
    """
    if system.predictor == ORACLE:
        raise MoecastError(
            f"system {system.name} knows the future routing: it is for replays of a trace "
            "(python -m train.evaluate). Live, choose another system"
        )
    what = chosen if chosen is not None else system.predictor if system.prefetch else None
    if what is None:
        return None
    # Here, because the zoo and what it imports take 10 MiB that serving on demand has no use for.
    from zoo.errors import MismatchError
    from zoo.load import find_entry

    options = system.predictor_options if what == system.predictor else None
    try:
        made = forecaster(what, spec, name=name, options=options, entries=entries, makers=makers)
    except MismatchError as error:
        if chosen is not None:
            raise
        log.warning("system %s serves on demand: %s", system.name, error)
        return None
    if made is None and chosen is not None:
        # What the user asked for by name is not left out: this says what there is.
        find_entry(f"{name}/{what}")
    if made is None and system.fallback is not None:
        made = forecaster(system.fallback, spec, name=name, entries=entries, makers=makers)
        if made is not None:
            _missing(f"system {system.name} forecasts with {system.fallback}", what, name)
    if made is None:
        _missing(f"system {system.name} serves on demand", what, name)
    return made


def load_reuse_predictor(
    system: SystemConfig, spec: ModelSpec, *, name: str, entries: Path | None = None
) -> Predictor | None:
    """What a system keeps experts by.

    Where that is a kind without an entry for this model, the eviction policy goes by what it counts
    itself, and this is said.
    """
    if system.reuse_predictor is None:
        return None
    made = forecaster(system.reuse_predictor, spec, name=name, entries=entries)
    if made is None:
        _missing(f"system {system.name} keeps by usage counts", system.reuse_predictor, name)
    return made


def _missing(what_then: str, kind: str | Path, name: str) -> None:
    log.warning(
        "%s: there is no zoo entry %s/%s. `python -m train` makes one; predictor=NAME or "
        "predictor=FOLDER gives another",
        what_then,
        name,
        kind,
    )
