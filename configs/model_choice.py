"""The forms of `model=VALUE`: a preset, a folder, a GGUF file, or a repository of the Hub."""

import os
import shlex
from collections.abc import Sequence
from dataclasses import replace
from difflib import get_close_matches

from configs.arguments import Option
from predictors.errors import ConfigError
from predictors.files import expand_home, path_exists
from runtime.config import BUILTIN, GGUF
from runtime.store.hub_snapshot import HUB_ID

MODEL = "model"
ID = "model.id"
IDENTITY = (MODEL, ID, "model.name", "model.revision")
"""Options that say which model it is; the others say how to load it."""


def choose_model(
    options: Sequence[Option], presets: Sequence[str]
) -> tuple[list[Option], dict[str, str] | None]:
    """Returns the options, and the id and the name of a model that is no preset.

    Such a model has no value of a preset. One on the command line replaces that of a file. Raises
    ConfigError for a word that is neither a preset nor a folder.
    """
    if any(option.key in (MODEL, ID) and option.file is None for option in options):
        options = [
            option for option in options if option.file is None or option.key not in IDENTITY
        ]
    named = [option for option in options if option.key == MODEL]
    ids = [option for option in options if option.key == ID]
    if named and named[-1].text in presets:
        return list(options), None
    if named:
        model = named[-1]
        if ids:
            raise ConfigError(f"model={model.text} and model.id={ids[-1].text}: give one of them")
        ids = [replace(model, key=ID, value=find_model_id(model, presets))]
        options = [option for option in options if option.key != MODEL]
    if not ids or ids[-1].text == BUILTIN:
        return list(options), None
    return list(options), {"id": ids[-1].text, "name": name_model(ids[-1].text)}


def find_model_id(option: Option, presets: Sequence[str]) -> str:
    """Returns the folder or the Hub id of `model=VALUE`; ConfigError for an unknown word."""
    value = option.text
    path = expand_home(value)
    if path.suffix in (".yaml", ".yml") and path_exists(path) and path.is_file():
        raise ConfigError(
            f"model={value} is a file of options: give it as --config {shlex.quote(value)}"
        )
    if path_exists(path) or is_path(value) or HUB_ID.fullmatch(value):
        return str(path) if value.startswith("~") else value
    close = get_close_matches(value, presets, n=1, cutoff=0.5)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ConfigError(
        f"unknown model {value!r}.{hint} A model is a preset (--help model lists them), a folder "
        f"(./{value}), a GGUF file or a repository of the Hub (ORG/NAME)"
    )


def is_path(value: str) -> bool:
    return value.startswith((".", "~")) or (os.sep in value and not HUB_ID.fullmatch(value))


def name_model(model_id: str) -> str:
    """Returns the short name of a folder, a GGUF file or a repository of the Hub."""
    path = expand_home(model_id)
    name = path.resolve().name if path_exists(path) else path.name
    return name.removesuffix(GGUF)
