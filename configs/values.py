"""Turns an option's text or YAML value into the value of its declared type."""

from pathlib import Path
from types import NoneType
from typing import Any, get_origin

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from configs.errors import ConfigError
from configs.options import Option
from configs.renamed import explain_choice
from configs.schema import enum_values, union_members
from predictors.errors import unknown


def set_option(config: DictConfig, option: Option, kind: Any) -> None:
    """Sets one option to its text from the command line, or to its value from a file."""
    value = option.value
    is_list = kind in (list[str], list[int])
    if is_list and not isinstance(value, list):
        value = parse_value(option.key, str(value), kind)
    elif isinstance(value, str) and option.file is None:
        value = parse_value(option.key, value, kind)
    elif isinstance(value, str):
        value = escape(enum_member_name(option.key, kind, value))
    # The owner of a plain dictionary checks its keys: any may be added.
    is_open = kind is Any or get_origin(kind) is dict
    OmegaConf.update(config, option.key, value, merge=True, force_add=is_open)


def parse_value(key: str, text: str, kind: Any) -> Any:
    """Returns the value of an option's text for its declared type."""
    if kind == list[str] and not text.startswith("["):
        return [escape(word.strip()) for word in text.split(",")]
    if kind == list[int] and not text.startswith("["):
        text = f"[{text}]"
    if is_text(kind, text):
        return None if text == "null" and NoneType in union_members(kind) else escape(text)
    override = OverridesParser.create().parse_override(f"{key}={enum_member_name(key, kind, text)}")
    if override.is_sweep_override():
        raise ConfigError(f"{key}={text}: several values need -m, which runs each combination")
    return override.value()


def escape(text: str) -> str:
    """Keeps OmegaConf from taking `${...}` in a user's text for a reference."""
    return text.replace("${", "\\${")


def enum_member_name(key: str, kind: Any, value: str) -> str:
    """Returns the name that OmegaConf needs for an enum's value; other values unchanged."""
    choices = enum_values(kind)
    if not choices or (value == "null" and NoneType in union_members(kind)):
        return value
    if value not in choices:
        raise ConfigError(explain_choice(key, value) or unknown(key, value, choices))
    return choices[value]


def is_text(kind: Any, value: str) -> bool:
    """Whether an option's value is unparsed text."""
    quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
    return bool({str, Path} & set(union_members(kind))) and not quoted
