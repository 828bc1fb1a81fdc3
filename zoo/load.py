"""From what a user writes after `predictor=` to an entry, and to a predictor that fits a model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from predictors.base import Predictor
from predictors.errors import unknown
from predictors.spec import ModelSpec
from zoo.entry import Entry, open_entry
from zoo.errors import MismatchError, ZooError
from zoo.index import Zoo, parse_reference
from zoo.manifest import NAME
from zoo.places import builtin, local


def zoos() -> list[Zoo]:
    """Where names are looked up, first match wins: what was pulled, then what ships with us."""
    return [Zoo(local()), Zoo(builtin())]


def listed() -> set[str]:
    """Names of all entries that are here."""
    return {name for zoo in zoos() for name in zoo.index().entries}


def find(reference: str | Path) -> Entry:
    """The entry that a name (`NAME`, `NAME@latest`, `NAME@DIGEST`) or a folder's path means.

    A name that a zoo lists is the zoo's; anything else that exists is a folder. ZooError with
    the choices when it is neither. No network.
    """
    if isinstance(reference, str) and NAME.fullmatch(reference.partition("@")[0]):
        named = parse_reference(reference)
        holders = [zoo for zoo in zoos() if named.name in zoo.index().entries]
        if holders:
            return next((zoo for zoo in holders if zoo.holds(named)), holders[0]).open(named)
    if Path(reference).is_dir():
        return open_entry(reference)
    raise ZooError(
        f"{unknown('zoo entry', str(reference), listed())}. "
        "Or name an entry's folder; python -m zoo list shows what is here, "
        "python -m zoo pull NAME from=FOLDER gets others"
    )


def load_predictor(
    reference: str | Path, *, spec: ModelSpec | None, options: Mapping[str, Any] | None = None
) -> Predictor:
    """A predictor from the zoo or a folder, every byte of it checked; `options` take the place of
    the entry's own of that name.

    `spec` is the model that it is to serve: MismatchError, naming both sides, when the entry was
    made for another; None takes the entry's own word for it.
    """
    from predictors.registry import from_files

    entry = find(reference)
    manifest = entry.manifest
    if spec is not None:
        manifest.spec.require(
            spec,
            this=f"the zoo entry {manifest.name}",
            that="the model",
            error=MismatchError,
            hint="Choose an entry made for this model (python -m zoo list), "
            "or train one: python -m train",
        )
    return from_files(
        manifest.kind,
        manifest.spec,
        files=entry.payload(),
        options={**manifest.options, **(options or {})},
    )
