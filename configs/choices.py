"""The choices of the groups, which are the files of `configs/GROUP/`."""

import os
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import fields
from functools import cache
from pathlib import Path

import yaml
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from configs.errors import ConfigError
from configs.options import Option
from configs.schema import load_schemas
from predictors.config import ALL, SEVERAL
from predictors.errors import unknown
from predictors.files import expand_home, path_exists

FOLDER = Path(__file__).resolve().parent
SUFFIXES = (".jsonl", ".json", ".txt", ".md", ".csv", ".yaml", ".yml")
"""Endings of a file's name; a choice may have a dot too."""


def find_choice(option: Option, choices: Sequence[str]) -> str:
    """Returns the choice of a group that an option names; ConfigError if there is none."""
    key, value = option.key, option.text
    if value not in choices:
        raise ConfigError(explain_path(key, value, choices) or unknown(key, value, choices))
    return value


def explain_path(group: str, value: str, choices: Sequence[str]) -> str | None:
    """Returns the message for a path in place of a choice; None for another value."""
    path = expand_home(value)
    if not (os.sep in value or path.suffix in SUFFIXES or path_exists(path)):
        return None
    if path.suffix in (".yaml", ".yml"):
        return (
            f"{group}={value} is no choice. Give options in a file with --config {value} "
            f"(keys such as {group}.name), on top of a choice: {', '.join(choices)}"
        )
    if {"jsonl", "text", "hub"} <= set(choices):
        suffixes = {".jsonl": "jsonl", ".json": "jsonl"}
        kind = suffixes.get(path.suffix, "text" if path.suffix or path_exists(path) else "hub")
        return f"{group}={value} is a path: write {group}={kind} {group}.path={value}"
    if group == "predictor":
        return (
            f"predictor={value} is a path: this command takes a kind to train, "
            f"{', '.join(choices)}. A trained entry is for `generate predictor={value}`"
        )
    return f"{group}={value} is a path: {group} takes one of {', '.join(choices)}"


def multi_choice_defaults(root: str) -> dict[str, str]:
    """Returns the options that take several choices of the group of their name, with defaults."""
    return {
        field.name: field.metadata[SEVERAL]
        for field in fields(load_schemas(root)[root])
        if SEVERAL in field.metadata
    }


def group_choices(group: str) -> list[str]:
    return sorted(file.stem for file in (FOLDER / group).glob("*.yaml"))


def is_variant(group: str, choice: str) -> bool:
    """Returns whether a choice's file builds on that of another choice."""
    values = yaml.safe_load((FOLDER / group / f"{choice}.yaml").read_text())
    return any(not default.startswith("/") for default in values["defaults"])


def check_choices(group: str, names: str) -> list[str]:
    """Returns the choices in `a,b` or `all`; ConfigError if there is none of a name.

    `all` leaves out the variants of other choices.
    """
    known = group_choices(group)
    words = [word.strip() for word in names.split(",")]
    choices = list(dict.fromkeys(words))
    if words == [ALL]:
        choices = [choice for choice in known if not is_variant(group, choice)]
    for choice in choices:
        if choice not in known:
            message = explain_path(group, choice, known)
            raise ConfigError(message or unknown(group, choice, [*known, ALL]))
    return choices


def compose_choices(group: str, names: str) -> list[DictConfig]:
    """Composes each choice of `a,b` or `all`. The schemas must have been registered."""
    return deepcopy(compose_together(group, tuple(check_choices(group, names))))


@cache
def compose_together(group: str, choices: tuple[str, ...]) -> list[DictConfig]:
    """Composes choices of a group at once: one composition takes about as long as another."""
    keys = [f"choice{number}" for number in range(len(choices))]
    overrides = [f"+{group}@{key}={choice}" for key, choice in zip(keys, choices, strict=True)]
    with initialize_config_dir(config_dir=str(FOLDER), version_base="1.3"):
        composed = compose(None, overrides=overrides)
    return [composed[key] for key in keys]
