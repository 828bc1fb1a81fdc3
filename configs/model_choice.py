"""The forms of `model=VALUE`: a preset, a folder, a GGUF file, or a repository of the Hub."""

import os
from collections.abc import Sequence
from dataclasses import fields, replace
from difflib import get_close_matches

from configs.errors import ConfigError
from configs.options import Option
from predictors.files import expand_home, path_exists
from runtime.config import BUILTIN, GGUF, ModelConfig
from runtime.store.hub_snapshot import HUB_ID

GROUP = "model"
ID = "model.id"
IDENTITY = (GROUP, ID, "model.name", "model.revision")
"""Options that say which model it is; the others say how to load it."""


def choose_model(options: Sequence[Option], presets: Sequence[str]) -> list[Option]:
    """Writes `model=FOLDER` and `model=ORG/NAME` as `model.id`, with no field of a preset.

    A model on the command line replaces that of a file. Raises ConfigError for a word that is
    neither a preset nor a folder.
    """
    typed = [option for option in options if option.file is None]
    if any(option.key in (GROUP, ID) for option in typed):
        options = [
            option for option in options if option.file is None or option.key not in IDENTITY
        ]
    named = [option for option in options if option.key == GROUP]
    ids = [option for option in options if option.key == ID]
    if named and named[-1].text in presets:
        return list(options)
    if named:
        model = named[-1]
        if ids:
            raise ConfigError(f"model={model.text} and model.id={ids[-1].text}: give one of them")
        ids = [replace(model, key=ID, value=find_model_id(model, presets))]
        options = [option for option in options if option.key != GROUP] + ids
    if not ids or ids[-1].text == BUILTIN:
        return list(options)
    plain = ModelConfig(id=ids[-1].text, name=name_model(ids[-1].text))
    unset = [
        Option(key=f"{GROUP}.{field.name}", value=getattr(plain, field.name), file=ids[-1].file)
        for field in fields(ModelConfig)
    ]
    return unset + list(options)


def find_model_id(option: Option, presets: Sequence[str]) -> str:
    """Returns the folder or the Hub id of `model=VALUE`; ConfigError for an unknown word."""
    value = option.text
    path = expand_home(value)
    if path.suffix in (".yaml", ".yml") and path_exists(path) and path.is_file():
        raise ConfigError(f"model={value} is a file of options: give it as --config {value}")
    if path_exists(path) or is_path(value) or HUB_ID.fullmatch(value):
        return str(path) if value.startswith("~") else value
    raise ConfigError(unknown_model(value, presets))


def is_path(value: str) -> bool:
    return value.startswith((".", "~")) or (os.sep in value and not HUB_ID.fullmatch(value))


def unknown_model(value: str, presets: Sequence[str]) -> str:
    close = get_close_matches(value, presets, n=1, cutoff=0.5)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return (
        f"unknown model {value!r}.{hint} A model is a preset (--help model lists them), a folder "
        f"(./{value}), a GGUF file or a repository of the Hub (ORG/NAME)"
    )


def name_model(model_id: str) -> str:
    """Returns the short name of a folder, a GGUF file or a repository of the Hub."""
    path = expand_home(model_id)
    name = path.resolve().name if path_exists(path) else path.name
    return name.removesuffix(GGUF)
