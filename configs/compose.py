"""From `key=value` arguments to one typed configuration, with errors that name the choices.

Hydra composes; what it says when something is wrong is replaced by one line that lists what
there is and the closest of it.
"""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from types import NoneType
from typing import Any, get_origin

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from configs.renamed import explain_choice, explain_option
from configs.schema import alternatives, keys, members, register, schemas, type_of
from predictors.config import ALL, SEVERAL
from predictors.errors import MoecastError, unknown

FOLDER = Path(__file__).resolve().parent


class ConfigError(MoecastError):
    """An argument or a configuration file that does not fit the command's schema."""


@dataclass(frozen=True)
class Groups:
    """The groups that a root configuration draws from."""

    chosen: dict[str, str]
    """Group to its choice by default. A group that is drawn from twice, the second time for another
    key (`data@shifted` in Hydra's words), is named by that key."""
    choices: dict[str, list[str]]
    """Group to everything that can be chosen."""
    hydra_names: dict[str, str]
    """Group to what Hydra calls it."""


@contextmanager
def hydra_session(root: str) -> Iterator[None]:
    """Hydra's global state, for the time of one composition; its faults become ConfigError."""
    register(root)
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
    said = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return f"{key}: {said}" if key else said


def defaults(root: str) -> tuple[DictConfig, Groups]:
    """The root configuration as it is without arguments, and its groups."""
    with hydra_session(root):
        composed = compose(root, return_hydra_config=True)
        loader = GlobalHydra.instance().config_loader()
        chosen, choices, names = {}, {}, {}
        for name, choice in composed.hydra.runtime.choices.items():
            if name.startswith("hydra/"):
                continue
            drawn_from, _, key = name.partition("@")
            group = key or drawn_from
            chosen[group], names[group] = str(choice), name
            choices[group] = sorted(loader.get_group_options(drawn_from))
        with open_dict(composed):
            del composed["hydra"]
        return composed, Groups(chosen, choices, names)


def compose_typed(root: str, arguments: Sequence[str]) -> tuple[Any, DictConfig]:
    """The dataclass that the root's schema names, and the same as a resolved tree for the record.

    The text after the first `=` of an option that takes text or a path is taken as it stands, so
    that a prompt may hold commas, brackets and braces. One that takes a list of words takes them
    with commas between them, and one that takes several choices of a group (`list[SystemConfig]`)
    their names; everything else is Hydra's grammar.

    Raises:
        ConfigError: an argument does not fit.
    """
    base, groups = defaults(root)
    selections = [one for one in arguments if split(one)[0] in groups.chosen]
    values = [one for one in arguments if split(one)[0] not in groups.chosen]
    for group, choice in map(split, selections):
        if choice not in groups.choices[group]:
            raise ConfigError(
                explain_choice(group, choice) or unknown(group, choice, groups.choices[group])
            )
    selections = [
        f"{groups.hydra_names[group]}={choice}" for group, choice in map(split, selections)
    ]
    with hydra_session(root):
        if selections:
            base = compose(root, overrides=selections)
        texts: dict[str, Any] = {}
        rest = []
        several = several_of(root)
        for key, value in map(split, values):
            kind = declared(base, key, groups, root)
            if key in several:
                several[key] = value
            elif takes_texts(kind, value):
                texts[key] = [one.strip() for one in value.split(",")]
            elif kind == list[int] and not value.startswith("["):
                rest.append(f"{key}=[{value}]")
            elif takes_text(kind, value):
                absent = value == "null" and NoneType in alternatives(kind)
                texts[key.lstrip("+")] = None if absent else value.replace("${", "\\${")
            else:
                # A plain dictionary's keys are its owner's to check: any may be added.
                plus = "++" if kind is Any or get_origin(kind) is dict else ""
                rest.append(f"{plus}{key.lstrip('+')}={member_name(key, kind, value)}")
        config = compose(root, overrides=selections + rest) if rest else base
        for key, value in several.items():
            OmegaConf.update(config, key, members_of(key, value))
        for key, text in texts.items():
            OmegaConf.update(config, key, text)
        return typed(config), config


def typed(config: DictConfig) -> Any:
    """The one conversion from Hydra's tree to dataclasses; the checks across fields run here."""
    missing = sorted(OmegaConf.missing_keys(config))
    if missing:
        raise ConfigError(f"{missing[0]}=... is required; give it on the command line")
    return OmegaConf.to_object(config)


def split(argument: str) -> tuple[str, str]:
    """Key and value of `key=value`."""
    key, equals, value = argument.partition("=")
    if not equals or not key:
        raise ConfigError(f"{argument!r} is not an option: write key=value; --help lists the keys")
    return key, value


def declared(config: DictConfig, key: str, groups: Groups, root: str) -> Any:
    """Returns the type of an option.

    Raises:
        ConfigError: there is no such option; the message names its new name or the choices.
    """
    try:
        return type_of(config, key.lstrip("+"))
    except KeyError:
        known = set(keys(config)) | set(groups.chosen)
        message = explain_option(root, key.lstrip("+")) or unknown("option", key, known)
        raise ConfigError(message) from None


def member_name(key: str, kind: Any, value: str) -> str:
    """The name that OmegaConf wants for an enumerated type's value; other values as they are."""
    choices = members(kind)
    if not choices or (value == "null" and NoneType in alternatives(kind)):
        return value
    if value not in choices:
        raise ConfigError(explain_choice(key, value) or unknown(key, value, choices))
    return choices[value]


def takes_text(kind: Any, value: str) -> bool:
    """Whether an option's value is to be taken as it stands."""
    quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
    return bool({str, Path} & set(alternatives(kind))) and not quoted


def takes_texts(kind: Any, value: str) -> bool:
    """Whether an option's value is a list of words with commas between them."""
    return kind == list[str] and not value.startswith("[")


def several_of(root: str) -> dict[str, str]:
    """The root's options that take several choices of the group of their name, and what they are
    without an argument.
    """
    return {
        field.name: field.metadata[SEVERAL]
        for field in fields(schemas(root)[root])
        if SEVERAL in field.metadata
    }


def choices_of(group: str) -> list[str]:
    """Everything that can be chosen of a group."""
    return sorted(file.stem for file in (FOLDER / group).glob("*.yaml"))


def members_of(group: str, names: str) -> list[DictConfig]:
    """`a,b` or `all`: each choice of the group, composed. Within a Hydra session."""
    known = choices_of(group)
    asked = [one.strip() for one in names.split(",")]
    chosen = known if asked == [ALL] else list(dict.fromkeys(asked))
    for one in chosen:
        if one not in known:
            raise ConfigError(explain_choice(group, one) or unknown(group, one, [*known, ALL]))
    return [compose(None, overrides=[f"+{group}={one}"])[group] for one in chosen]


def sweep(arguments: Sequence[str]) -> list[list[str]]:
    """Every combination of the comma lists and ranges among the arguments (Hydra's grid)."""
    try:
        parsed: list[Override] = OverridesParser.create().parse_overrides(list(arguments))
    except HydraException as error:
        raise ConfigError(one_line(error)) from error
    axes = []
    for one in parsed:
        if one.is_sweep_override():
            axes.append(
                [f"{one.get_key_element()}={value}" for value in one.sweep_string_iterator()]
            )
        else:
            assert one.input_line is not None
            axes.append([one.input_line])
    return [list(combination) for combination in itertools.product(*axes)]
