"""Merges options to one typed configuration, and lists the choices of its groups.

Each layer lies over those before it: the defaults of the dataclass, the choices of its groups
(`configs/GROUP/NAME.yaml`), files of options, the command line. `model=` takes a preset, a folder,
a GGUF file or a repository of the Hub; with `-m`, comma lists make several runs.
"""

import itertools
import math
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin

from configs.arguments import Option, read_options
from predictors.config import ALL, GROUP, ChoiceGroup
from predictors.errors import ConfigError, unknown, unknown_option
from predictors.files import expand_home, path_exists
from predictors.typed_values import (
    build,
    default_values,
    field_types,
    is_text,
    option_keys,
    option_type,
    read_yaml,
    set_value,
    union_members,
)
from runtime.config import BUILTIN, GGUF
from runtime.presets import choice_names, is_variant, read_choice

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
    named = [option.text for option in options if option.key == MODEL]
    ids = [option.text for option in options if option.key == ID]
    if named and named[-1] in presets:
        ids = []
    elif named:
        if ids:
            raise ConfigError(f"model={named[-1]} and model.id={ids[-1]}: give one of them")
        ids = [find_model_id(named[-1], presets)]
        options = [option for option in options if option.key != MODEL]
    if not ids or ids[-1] == BUILTIN:
        return list(options), None
    return list(options), {"id": ids[-1], "name": name_model(ids[-1])}


def find_model_id(value: str, presets: Sequence[str]) -> str:
    """Returns the folder or the Hub id of `model=VALUE`; ConfigError for an unknown word."""
    path = expand_home(value)
    if path.suffix in (".yaml", ".yml") and path_exists(path) and path.is_file():
        raise ConfigError(
            f"model={value} is a file of options: give it as --config {shlex.quote(value)}"
        )
    if path_exists(path) or value.startswith((".", "~")) or os.sep in value:
        return str(path) if value.startswith("~") else value
    close = get_close_matches(value, presets, n=1, cutoff=0.5)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ConfigError(
        f"unknown model {value!r}.{hint} A model is a preset (--help model lists them), a folder "
        f"(./{value}), a GGUF file or a repository of the Hub (ORG/NAME)"
    )


def name_model(model_id: str) -> str:
    """Returns the short name of a folder, a GGUF file or a repository of the Hub."""
    path = expand_home(model_id)
    name = path.resolve().name if path_exists(path) else path.name
    return name.removesuffix(GGUF)


Schema = TypeVar("Schema")

LARGEST_SEED = 2**32 - 1
"""Lightning takes no larger one."""
SUFFIXES = (".jsonl", ".json", ".txt", ".md", ".csv", ".yaml", ".yml")
"""Endings of a file's name; a choice may have a dot too."""


def find_groups(schema: type) -> dict[str, ChoiceGroup]:
    """Returns the options of a dataclass that are chosen by name."""
    return {
        field.name: field.metadata[GROUP] for field in fields(schema) if GROUP in field.metadata
    }


def takes_several(schema: type, key: str) -> bool:
    return get_origin(field_types(schema)[key]) is list


def compose_defaults(
    schema: type, chosen: Mapping[str, Sequence[str]] | None = None
) -> dict[str, Any]:
    """Returns the values of a dataclass with the choices of its groups, by default its own."""
    values, chosen = default_values(schema), chosen or {}
    for key, group in find_groups(schema).items():
        declared = field_types(schema)[key]
        if takes_several(schema, key):
            names = chosen.get(key) or split_choices(group.folder, group.default)
            each = get_args(declared)[0]
            values[key] = [read_choice(group.folder, name, each) for name in names]
        else:
            (name,) = chosen.get(key, [group.default])
            values[key] = {**read_choice(group.folder, name, declared), **group.values}
    return values


def compose_typed(
    schema: type[Schema], arguments: Sequence[str], files: Sequence[Path] = ()
) -> tuple[Schema, dict[str, Any]]:
    """Composes options; returns the dataclass and the tree of its plain values for the record.

    On the command line, the value of an option of type text or path is the text after the first
    `=`, as it stands, so that a prompt may contain commas, quotes and brackets. A list of words is
    separated by commas, and so are the choices of an option that takes several of a group. Lists in
    brackets and dictionaries are YAML.

    Raises ConfigError if an option does not match the schema.
    """
    groups = find_groups(schema)
    options = read_options(arguments, files)
    identity = None
    if MODEL in groups and not takes_several(schema, MODEL):
        options, identity = choose_model(options, choice_names(groups[MODEL].folder))
    chosen: dict[str, Sequence[str]] = {}
    for option in options:
        if option.key in groups:
            with_source(option, choose, chosen, schema, groups[option.key], option)
    values = compose_defaults(schema, chosen)
    if identity is not None:
        values[MODEL] = default_values(declared_type(schema, MODEL)) | identity
    for option in options:
        if option.key not in groups:
            with_source(option, set_option, values, schema, option)
    config = build(schema, values)
    if not 0 <= values.get("seed", 0) <= LARGEST_SEED:
        raise ConfigError(f"seed={values['seed']}: must be from 0 to {LARGEST_SEED}")
    return config, values


def with_source(option: Option, apply: Any, *arguments: Any) -> None:
    """Applies an option, with the name of its file in errors."""
    try:
        apply(*arguments)
    except ConfigError as error:
        raise ConfigError(f"{option.file}: {error}" if option.file else str(error)) from error
    except RecursionError as error:
        raise ConfigError(f"{option.key}: its values are nested too deeply") from error


def set_option(values: dict[str, Any], schema: type, option: Option) -> None:
    declared = declared_type(schema, option.key)
    value = option.value
    if option.file is None:
        value = parse_text(option.key, value, declared)
    set_value(values, schema, option.key, value)


def declared_type(schema: type, key: str) -> Any:
    """Returns the type of an option; ConfigError has the closest one."""
    try:
        return option_type(schema, key)
    except KeyError:
        known = {*option_keys(schema), *find_groups(schema)}
        raise ConfigError(unknown_option(key, known)) from None


def parse_text(key: str, text: str, declared: Any) -> Any:
    """Returns the value of a command line's text as a YAML file would have it."""
    members = union_members(declared)
    if text == "null" and NoneType in members:
        return None
    is_list = get_origin(declared) is list
    if is_text(declared) or (is_list and not text.startswith("[")):
        return text
    if not is_list and declared is not Any and set(members) <= {bool, int, float, NoneType}:
        return text
    try:
        value = read_yaml(text)
        if get_origin(declared) is dict and isinstance(value, dict):
            # To YAML, a colon without a space after it is a part of the key.
            for name in [name for name, part in value.items() if part is None and ":" in str(name)]:
                value.pop(name)
                value |= read_yaml(name.replace(":", ": ", 1))
        return value
    except ValueError as error:
        raise ConfigError(f"{key}={text[:200]}: {error}") from error


def choose(
    chosen: dict[str, Sequence[str]], schema: type, group: ChoiceGroup, option: Option
) -> None:
    """Notes the choices that an option names; ConfigError for one that does not exist."""
    key, text = option.key, option.text
    if takes_several(schema, key):
        chosen[key] = split_choices(group.folder, text)
    else:
        check_choice(key, group.folder, text)
        chosen[key] = [text]


def split_choices(folder: str, names: str) -> list[str]:
    """Returns the choices in `a,b` or `all`, which leaves out the variants of others."""
    words = [word.strip() for word in names.split(",")]
    if words == [ALL]:
        return [name for name in choice_names(folder) if not is_variant(folder, name)]
    for word in words:
        check_choice(folder, folder, word, ALL)
    return list(dict.fromkeys(words))


def check_choice(key: str, folder: str, name: str, *also: str) -> None:
    known = choice_names(folder)
    if name not in known:
        raise ConfigError(explain_path(key, name, folder) or unknown(key, name, [*known, *also]))


def explain_path(key: str, value: str, folder: str) -> str | None:
    """Returns the message for a path in place of a choice; None for another value."""
    path, known = expand_home(value), ", ".join(choice_names(folder))
    if not (os.sep in value or path.suffix in SUFFIXES or path_exists(path)):
        return None
    if path.suffix in (".yaml", ".yml"):
        return (
            f"{key}={value} is no choice. Give options in a file with --config {value} "
            f"(keys such as {key}.name), on top of a choice: {known}"
        )
    if folder == "data":
        suffixes = {".jsonl": "jsonl", ".json": "jsonl"}
        kind = suffixes.get(path.suffix, "text" if path.suffix or path_exists(path) else "hub")
        return f"{key}={value} is a path: write {key}={kind} {key}.path={value}"
    if folder == "predictor":
        return (
            f"predictor={value} is a path: this command takes a kind to train, {known}. "
            f"A trained entry is for `generate predictor={value}`"
        )
    return f"{key}={value} is a path: {key} takes one of {known}"


MOST_RUNS = 10_000
"""Runs of one sweep at most: more are a slip of the keyboard, and would not fit in memory."""

WORD = re.compile(r"""\s*(?:'((?:\\.|[^'\\])*)'|"((?:\\.|[^"\\])*)"|([^,]*?))\s*,""", re.DOTALL)
"""A text and the comma after it, which quotes may enclose."""


def expand_sweep(schema: type, options: Sequence[str]) -> list[list[str]]:
    """Returns every combination of the comma lists in the options.

    In a text, quotes keep commas together, and are then no part of it: `prompt='a, b'`; elsewhere
    brackets do: `logger=[csv,wandb]`.

    Raises:
        ConfigError: an unknown option, or more than `MOST_RUNS` runs.
    """
    axes = []
    for option in options:
        key, _, text = option.partition("=")
        values = split_values(text, declared_type(schema, key))
        axes.append([f"{key}={value}" for value in values])
    if (num_runs := math.prod(map(len, axes))) > MOST_RUNS:
        raise ConfigError(f"-m makes {num_runs:,} runs of these options; at most {MOST_RUNS:,}")
    return [list(combination) for combination in itertools.product(*axes)]


def split_values(text: str, declared: Any) -> list[str]:
    if is_text(declared):
        return ["".join(parts) for parts in WORD.findall(f"{text},")]
    values, depth = [""], 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth <= 0:
            values.append("")
        else:
            values[-1] += character
    return [value.strip() for value in values]
