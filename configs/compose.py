"""Composes `key=value` arguments to one typed configuration.

Hydra composes; its error messages are replaced by one line with the choices and the closest one.
"""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, get_origin

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from configs.renamed import explain_choice, explain_option
from configs.schema import (
    enum_values,
    load_schemas,
    option_keys,
    option_type,
    register_schemas,
    union_members,
)
from predictors.config import ALL, SEVERAL
from predictors.errors import MoecastError, unknown

FOLDER = Path(__file__).resolve().parent


class ConfigError(MoecastError):
    """An argument or a configuration file that does not match the command's schema."""


@dataclass(frozen=True)
class ConfigGroups:
    chosen: dict[str, str]
    """Group to its default choice. A group that is used for a second key (`data@shifted` in Hydra)
    is named by that key."""
    choices: dict[str, list[str]]
    """Group to its choices."""
    hydra_names: dict[str, str]
    """Group to its name in Hydra."""


@contextmanager
def hydra_session(root: str) -> Iterator[None]:
    """Initialises Hydra for one composition; translates its errors to ConfigError."""
    register_schemas(root)
    try:
        with initialize_config_dir(config_dir=str(FOLDER), version_base="1.3"):
            yield
    except (HydraException, OmegaConfBaseException) as error:
        # A file of the user's may have an old key too.
        raise ConfigError(explain_option(root, full_key(error)) or one_line(error)) from error


def full_key(error: BaseException) -> str:
    """Returns the dotted key that a Hydra or OmegaConf message is about; empty if it names none."""
    lines = map(str.strip, str(error.__cause__ or error).splitlines())
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("full_key:")), ""
    )


def one_line(error: BaseException) -> str:
    """Returns the message of a Hydra or OmegaConf error with the key and the file it is about."""
    lines = [line.strip() for line in str(error.__cause__ or error).splitlines() if line.strip()]
    key = full_key(error)
    # "In 'data/mine': ValidationError raised while composing config:" has the reason below it.
    message = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return f"{key}: {message}" if key else message


def compose_defaults(root: str) -> tuple[DictConfig, ConfigGroups]:
    """Composes the root configuration without arguments; returns it and its groups."""
    with hydra_session(root):
        composed = compose(root, return_hydra_config=True)
        chosen, choices, names = {}, {}, {}
        for name, choice in composed.hydra.runtime.choices.items():
            if name.startswith("hydra/"):
                continue
            hydra_group, _, key = name.partition("@")
            group = key or hydra_group
            chosen[group], names[group] = str(choice), name
            choices[group] = group_choices(hydra_group)
        with open_dict(composed):
            del composed["hydra"]
        return composed, ConfigGroups(chosen, choices, names)


def compose_typed(root: str, arguments: Sequence[str]) -> tuple[Any, DictConfig]:
    """Composes arguments; returns the root's dataclass and the resolved tree for the record.

    The value of an option of type text or path is the text after the first `=`, unparsed, so that
    a prompt may contain commas, brackets and braces. A list of words is separated by commas, and
    so are the choices of an option that takes several of a group (`list[SystemConfig]`). All other
    values follow Hydra's grammar.

    Raises ConfigError if an argument does not match the schema.
    """
    base, groups = compose_defaults(root)
    selections = [text for text in arguments if split_option(text)[0] in groups.chosen]
    values = [text for text in arguments if split_option(text)[0] not in groups.chosen]
    for group, choice in map(split_option, selections):
        if choice not in groups.choices[group]:
            raise ConfigError(
                explain_choice(group, choice) or unknown(group, choice, groups.choices[group])
            )
    selections = [
        f"{groups.hydra_names[group]}={choice}" for group, choice in map(split_option, selections)
    ]
    with hydra_session(root):
        if selections:
            base = compose(root, overrides=selections)
        texts: dict[str, Any] = {}
        rest = []
        several = multi_choice_defaults(root)
        for key, value in map(split_option, values):
            kind = declared_type(base, key, groups, root)
            if key in several:
                several[key] = value
            elif kind == list[str] and not value.startswith("["):
                texts[key] = [word.strip() for word in value.split(",")]
            elif kind == list[int] and not value.startswith("["):
                rest.append(f"{key}=[{value}]")
            elif is_text(kind, value):
                absent = value == "null" and NoneType in union_members(kind)
                texts[key.lstrip("+")] = None if absent else value.replace("${", "\\${")
            else:
                # The owner of a plain dictionary checks its keys: any may be added.
                plus = "++" if kind is Any or get_origin(kind) is dict else ""
                rest.append(f"{plus}{key.lstrip('+')}={enum_member_name(key, kind, value)}")
        config = compose(root, overrides=selections + rest) if rest else base
        for key, value in several.items():
            OmegaConf.update(config, key, compose_choices(key, value))
        for key, text in texts.items():
            OmegaConf.update(config, key, text)
        missing = sorted(OmegaConf.missing_keys(config))
        if missing:
            raise ConfigError(f"{missing[0]}=... is required; give it on the command line")
        # Converting to dataclasses runs their checks across fields.
        return OmegaConf.to_object(config), config


def split_option(argument: str) -> tuple[str, str]:
    """Splits `key=value`; ConfigError if the argument is not an option."""
    key, equals, value = argument.partition("=")
    if not equals or not key:
        raise ConfigError(f"{argument!r} is not an option: write key=value; --help lists the keys")
    return key, value


def declared_type(config: DictConfig, key: str, groups: ConfigGroups, root: str) -> Any:
    """Returns the type of an option; ConfigError has its new name or the choices."""
    try:
        return option_type(config, key.lstrip("+"))
    except KeyError:
        known = set(option_keys(config)) | set(groups.chosen)
        message = explain_option(root, key.lstrip("+")) or unknown("option", key, known)
        raise ConfigError(message) from None


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


def multi_choice_defaults(root: str) -> dict[str, str]:
    """Returns the options that take several choices of the group of their name, with defaults."""
    return {
        field.name: field.metadata[SEVERAL]
        for field in fields(load_schemas(root)[root])
        if SEVERAL in field.metadata
    }


def group_choices(group: str) -> list[str]:
    return sorted(file.stem for file in (FOLDER / group).glob("*.yaml"))


def compose_choices(group: str, names: str) -> list[DictConfig]:
    """Composes each choice of `a,b` or `all`. Must be called within a Hydra session."""
    known = group_choices(group)
    words = [word.strip() for word in names.split(",")]
    choices = known if words == [ALL] else list(dict.fromkeys(words))
    for choice in choices:
        if choice not in known:
            message = explain_choice(group, choice) or unknown(group, choice, [*known, ALL])
            raise ConfigError(message)
    return [deepcopy(compose_choice(group, choice)) for choice in choices]


@cache
def compose_choice(group: str, choice: str) -> DictConfig:
    """Composes one choice of a group. Must be called within a Hydra session."""
    return compose(None, overrides=[f"+{group}={choice}"])[group]


def expand_sweep(arguments: Sequence[str]) -> list[list[str]]:
    """Returns every combination of the comma lists and ranges in the arguments (Hydra's grid)."""
    try:
        parsed: list[Override] = OverridesParser.create().parse_overrides(list(arguments))
    except HydraException as error:
        raise ConfigError(one_line(error)) from error
    axes = []
    for override in parsed:
        if override.is_sweep_override():
            axes.append(
                [
                    f"{override.get_key_element()}={value}"
                    for value in override.sweep_string_iterator()
                ]
            )
        else:
            assert override.input_line is not None
            axes.append([override.input_line])
    return [list(combination) for combination in itertools.product(*axes)]
