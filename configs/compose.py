"""Composes `key=value` arguments to one typed configuration.

Hydra composes; its error messages are replaced by one line with the choices and the closest one.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from configs.choices import (
    FOLDER,
    check_choices,
    compose_choices,
    find_choice,
    group_choices,
    multi_choice_defaults,
)
from configs.errors import ConfigError, unknown_option
from configs.model_choice import GROUP as MODEL
from configs.model_choice import choose_model
from configs.options import Option, read_options
from configs.schema import (
    option_keys,
    option_type,
    register_schemas,
)
from configs.typed import Texts, build_config, plain_values
from configs.values import set_option


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
def config_errors() -> Iterator[None]:
    """Translates the errors of Hydra and OmegaConf to ConfigError."""
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(one_line(error)) from error


def full_key(error: BaseException) -> str:
    """Returns the dotted key that a Hydra or OmegaConf message is about; empty if it names none."""
    lines = map(str.strip, str(error.__cause__ or error).splitlines())
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("full_key:")), ""
    )


def one_line(error: BaseException) -> str:
    """Returns the message of a Hydra or OmegaConf error with the key and the file it is about."""
    # The cause of an error of the grammar has no message.
    causes = [error.__cause__, error]
    text = next(text for text in map(str, causes) if text.strip() not in ("", "None"))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    key = full_key(error)
    # "In 'data/mine': ValidationError raised while composing config:" has the reason below it.
    message = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return f"{key}: {message}" if key else message


def compose_defaults(root: str) -> tuple[DictConfig, ConfigGroups]:
    """Returns the root configuration as it is without arguments, and its groups."""
    composed, groups = compose_root(root, FOLDER)
    return deepcopy(composed), groups


@cache
def compose_root(
    root: str, folder: Path, selections: tuple[str, ...] = ()
) -> tuple[DictConfig, ConfigGroups]:
    """Composes a root configuration with other choices of groups, `GROUP=CHOICE`.

    Hydra takes a tenth of a second and more, and one command needs the same configuration several
    times: for the types of its options, for each run of a sweep. Who changes it copies it first.
    """
    register_schemas(root)
    with config_errors(), initialize_config_dir(config_dir=str(folder), version_base="1.3"):
        composed = compose(root, overrides=list(selections), return_hydra_config=True)
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


def compose_typed(
    root: str, arguments: Sequence[str], files: Sequence[Path] = ()
) -> tuple[Any, dict[str, Any]]:
    """Composes options; returns the root's dataclass and the tree of plain values for the record.

    Options of the command line override those of YAML files. There, the value of an option of type
    text or path is the text after the first `=`, as it stands, so that a prompt may contain commas,
    quotes, brackets and `${...}`. A list of words is separated by commas, and so are the choices of
    an option that takes several of a group (`list[SystemConfig]`). All other values follow Hydra's
    grammar.

    Raises ConfigError if an option does not match the schema.
    """
    _, groups = compose_root(root, FOLDER)
    options = read_options(arguments, files)
    if MODEL in groups.chosen:
        options = choose_model(options, groups.choices[MODEL])
    chosen = {}
    for option in options:
        if option.key in groups.chosen:
            with named_file(option):
                chosen[option.key] = find_choice(option, groups.choices[option.key])
    selections = tuple(f"{groups.hydra_names[key]}={name}" for key, name in chosen.items())
    base = deepcopy(compose_root(root, FOLDER, selections)[0])
    texts: Texts = {}
    with config_errors():
        several = multi_choice_defaults(root)
        for option in options:
            if option.key in chosen:
                continue
            with named_file(option):
                kind = declared_type(base, option.key, groups)
                if option.key in several:
                    several[option.key] = option.text
                    check_choices(option.key, option.text)
                else:
                    set_option(base, option, kind, texts)
        for key, value in several.items():
            OmegaConf.update(base, key, compose_choices(key, value))
        return build_config(base, texts), plain_values(base, texts)


@contextmanager
def named_file(option: Option) -> Iterator[None]:
    """Adds the file's name to the errors of an option that is from a file."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{option.file}: {error}" if option.file else str(error)) from error
    except RecursionError as error:
        raise ConfigError(f"{option.key}: its values are nested too deeply") from error
    except (HydraException, OmegaConfBaseException) as error:
        if not option.file:
            raise
        raise ConfigError(f"{option.file}: {one_line(error)}") from error


def declared_type(config: DictConfig, key: str, groups: ConfigGroups) -> Any:
    """Returns the type of an option; ConfigError has the closest one."""
    try:
        return option_type(config, key)
    except KeyError:
        known = set(option_keys(config)) | set(groups.chosen)
        raise ConfigError(unknown_option(key, known)) from None
