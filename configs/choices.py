"""The choices of the groups, which are the files of `configs/GROUP/`."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import fields
from functools import cache
from pathlib import Path

from hydra import compose
from omegaconf import DictConfig

from configs.errors import ConfigError
from configs.options import Option
from configs.renamed import explain_choice
from configs.schema import load_schemas
from predictors.config import ALL, SEVERAL
from predictors.errors import unknown

FOLDER = Path(__file__).resolve().parent


def find_choice(option: Option, choices: Sequence[str]) -> str:
    """Returns the choice of a group that an option names; ConfigError if there is none."""
    if option.text not in choices:
        raise ConfigError(
            explain_choice(option.key, option.text) or unknown(option.key, option.text, choices)
        )
    return option.text


def multi_choice_defaults(root: str) -> dict[str, str]:
    """Returns the options that take several choices of the group of their name, with defaults."""
    return {
        field.name: field.metadata[SEVERAL]
        for field in fields(load_schemas(root)[root])
        if SEVERAL in field.metadata
    }


def group_choices(group: str) -> list[str]:
    return sorted(file.stem for file in (FOLDER / group).glob("*.yaml"))


def check_choices(group: str, names: str) -> list[str]:
    """Returns the choices in `a,b` or `all`; ConfigError if there is none of a name."""
    known = group_choices(group)
    words = [word.strip() for word in names.split(",")]
    choices = known if words == [ALL] else list(dict.fromkeys(words))
    for choice in choices:
        if choice not in known:
            message = explain_choice(group, choice) or unknown(group, choice, [*known, ALL])
            raise ConfigError(message)
    return choices


def compose_choices(group: str, names: str) -> list[DictConfig]:
    """Composes each choice of `a,b` or `all`. Must be called within a Hydra session."""
    return [deepcopy(compose_choice(group, choice)) for choice in check_choices(group, names)]


@cache
def compose_choice(group: str, choice: str) -> DictConfig:
    """Composes one choice of a group. Must be called within a Hydra session."""
    return compose(None, overrides=[f"+{group}={choice}"])[group]
