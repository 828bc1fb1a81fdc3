"""Turns an option's text or YAML value into the value of its declared type."""

import re
from pathlib import Path
from types import NoneType
from typing import Any, get_origin

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from configs.errors import ConfigError
from configs.options import Option
from configs.schema import enum_values, union_members
from configs.typed import Texts, check_text
from predictors.errors import unknown

REFERENCE = re.compile(r"(\\*)\$\{")
"""Text that OmegaConf resolves; a backslash before it escapes it."""


def set_option(config: DictConfig, option: Option, kind: Any, texts: Texts) -> None:
    """Sets one option to its text from the command line, or to its value from a file.

    Texts are kept in `texts`, as they stand; other values are set in `config`.
    """
    key, value = option.key, option.value
    for earlier in [name for name in texts if f"{name}.".startswith(f"{key}.")]:
        del texts[earlier]
    if is_text(kind) and isinstance(value, str):
        if value != "null" or option.file is not None or NoneType not in union_members(kind):
            texts[key] = check_text(key, value, kind)
            return
        value = None
    elif kind == list[str] and (words := split_words(value)) is not None:
        texts[key] = [check_text(key, word, str) for word in words]
        return
    elif isinstance(value, str) and (option.file is None or kind == list[int]):
        value = parse_value(key, value, kind)
    elif isinstance(value, str):
        value = enum_member_name(key, kind, value)
    elif kind in (list[str], list[int]) and not isinstance(value, list):
        value = parse_value(key, str(value), kind)
    # The owner of a plain dictionary checks its keys: any may be added.
    is_open = kind is Any or get_origin(kind) is dict
    OmegaConf.update(config, key, escape(value), merge=True, force_add=is_open)


def split_words(value: Any) -> list[str] | None:
    """Returns the texts of a list of texts; None if Hydra's grammar must read it (`[a,b]`)."""
    if isinstance(value, str):
        return None if value.startswith("[") else [word.strip() for word in value.split(",")]
    is_texts = isinstance(value, list) and all(isinstance(word, str) for word in value)
    return value if is_texts else None


def parse_value(key: str, text: str, kind: Any) -> Any:
    """Returns the value of an option's text, by Hydra's grammar, for its declared type."""
    if kind == list[int] and not text.startswith("["):
        text = f"[{text}]"
    elif kind == list[str] and not text.startswith("["):
        return [text]
    named = f"{key}={enum_member_name(key, kind, text)}"
    try:
        override = OverridesParser.create().parse_override(named)
    except HydraException as error:
        raise ConfigError(f"{key}={text}: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise ConfigError(f"{key}: its brackets are nested too deeply") from error
    if override.is_sweep_override():
        raise ConfigError(f"{key}={text}: several values need -m, which runs each combination")
    return override.value()


def escape(value: Any) -> Any:
    """Keeps OmegaConf from taking `${...}` in a user's value, or in its parts, for a reference."""
    if isinstance(value, str):
        return REFERENCE.sub(lambda match: f"{match[1] * 2}\\${{", value)
    if isinstance(value, dict):
        return {escape(key): escape(part) for key, part in value.items()}
    if isinstance(value, list):
        return [escape(part) for part in value]
    return value


def enum_member_name(key: str, kind: Any, value: str) -> str:
    """Returns the name that OmegaConf needs for an enum's value; other values unchanged."""
    choices = enum_values(kind)
    if not choices or (value == "null" and NoneType in union_members(kind)):
        return value
    if value not in choices:
        raise ConfigError(unknown(key, value, choices))
    return choices[value]


def is_text(kind: Any) -> bool:
    """Whether options of a declared type are texts or paths."""
    return bool({str, Path} & set(union_members(kind)))
