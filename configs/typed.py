"""Builds the typed configuration from a composed tree and the texts that the user gave.

Texts never enter the tree: OmegaConf would resolve `${...}` in them and take `???` for a missing
value.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from omegaconf import Container, DictConfig, OmegaConf

from configs.errors import ConfigError
from configs.schema import union_members
from predictors.files import expand_home

Texts = dict[str, Any]
"""Dotted key to the text, the path or the list of texts that the user gave."""

LARGEST = 2**63 - 1
"""Largest absolute value of a whole number: it must fit in 64 bits."""
LARGEST_SEED = 2**32 - 1
"""Lightning takes no larger one."""


def check_text(key: str, text: str, kind: Any) -> str | Path:
    """Returns a text as the declared type; ConfigError if no program could take it.

    Shells leave the `~` of `output=~/folder` to the program. A path may have bytes that are not
    UTF-8, as file names may.
    """
    is_path = Path in union_members(kind) and str not in union_members(kind)
    if "\0" in text:
        raise ConfigError(f"{key}: the text has a null character, which is not allowed")
    if is_path:
        return expand_home(text)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{key}: the text is not valid UTF-8") from None
    return text


def build_config(tree: DictConfig, texts: Mapping[str, Any]) -> Any:
    """Returns the dataclass of a composed tree; building it runs its checks across fields.

    Raises:
        ConfigError: an option without a value, or a number that is NaN, infinite or too large.
    """
    missing = sorted(set(OmegaConf.missing_keys(tree)) - set(texts))
    if missing:
        raise ConfigError(f"{missing[0]}=... is required; give it on the command line")
    check_numbers(plain_values(tree, texts))
    return build_node(tree, texts, "")


def build_node(node: DictConfig, texts: Mapping[str, Any], prefix: str) -> Any:
    schema = OmegaConf.get_type(node)
    assert is_dataclass(schema), f"{prefix} has no schema"
    values = {}
    for field in fields(schema):
        key, child = f"{prefix}{field.name}", node._get_node(field.name)
        if key in texts:
            values[field.name] = texts[key]
        elif isinstance(child, DictConfig) and is_dataclass(OmegaConf.get_type(child)):
            values[field.name] = build_node(child, texts, f"{key}.")
        elif isinstance(child, Container):
            values[field.name] = OmegaConf.to_object(child)
        else:
            values[field.name] = node[field.name]
    return schema(**values)


def plain_values(tree: DictConfig, texts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the tree of plain values for the record of a run."""
    values: Any = OmegaConf.to_container(tree, resolve=True)
    for key, text in texts.items():
        *parents, name = key.split(".")
        node = values
        for parent in parents:
            node = node[parent]
        node[name] = text
    return values


def check_numbers(values: Mapping[str, Any]) -> None:
    """Raises ConfigError for a number that is NaN, infinite or too large, or a negative seed."""
    for key, value in flatten_values(values):
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{key}={value}: must be a finite number")
        if isinstance(value, int) and abs(value) > LARGEST:
            raise ConfigError(f"{key}={value}: must fit in 64 bits, {LARGEST} at most")
    if not 0 <= values.get("seed", 0) <= LARGEST_SEED:
        raise ConfigError(f"seed={values['seed']}: must be from 0 to {LARGEST_SEED}")


def flatten_values(values: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the dotted keys and values of the leaves of plain dictionaries and lists."""
    if isinstance(values, Mapping):
        for name, value in values.items():
            yield from flatten_values(value, f"{key}.{name}" if key else str(name))
    elif isinstance(values, list):
        for value in values:
            yield from flatten_values(value, key)
    else:
        yield key, values
