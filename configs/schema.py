"""Registers the packages' schemas with Hydra, and finds the type of a configuration's key."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from importlib import import_module
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

PACKAGES = (
    "predictors",
    "zoo",
    "runtime",
    "runtime.tools.bench",
    "runtime.serving",
    "runtime.generation",
    "runtime.commands",
    "collect.launch",
    "collect",
    "train",
    "train.evaluate",
    "train.reference",
)


def load_schemas(root: str | None = None) -> dict[str, type]:
    """Returns the dataclass that owns each schema path ("train", "model/base").

    With `root`, only of the packages down to the one that owns this root: a package's
    configuration consists of its schemas and of those of the packages above it.

    A root `package.module:Class` is a schema without a YAML file and without groups.
    """
    owners: dict[str, type] = {}
    if root and ":" in root:
        module, _, name = root.partition(":")
        owners[root] = getattr(import_module(module), name)
        return owners | load_schemas()
    for package in PACKAGES:
        for path, schema in import_module(f"{package}.config").SCHEMAS.items():
            assert path not in owners, f"two packages register the schema {path!r}"
            owners[path] = schema
        if root in owners:
            break
    return owners


@cache
def register_schemas(root: str) -> None:
    """Stores each schema as `schema/PATH`: outside the groups, so that none is a choice.

    A root without a YAML file is stored at the top as well, where Hydra looks for roots.
    """
    store = ConfigStore.instance()
    for path, schema in load_schemas(root).items():
        if ":" in path:
            store.store(name=path, node=schema)
            continue
        group, _, name = path.rpartition("/")
        store.store(group=f"schema/{group}".rstrip("/"), name=name, node=schema)


def option_keys(config: DictConfig, prefix: str = "") -> Iterator[str]:
    """Yields the dotted keys of a configuration's values in the order of declaration."""
    for key in map(str, config):
        node = config._get_node(key)
        if isinstance(node, DictConfig) and is_dataclass(OmegaConf.get_type(node)):
            yield from option_keys(node, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def option_type(config: DictConfig, key: str) -> Any:
    """Returns the declared type of a dotted key, `Any` in a plain dictionary; KeyError if none."""
    node: Any = config
    declared: Any = Any
    for part in key.split("."):
        if not isinstance(node, DictConfig):
            raise KeyError(key)
        schema = OmegaConf.get_type(node)
        if not is_dataclass(schema):
            return Any
        if part not in {field.name for field in fields(schema)}:
            raise KeyError(key)
        declared = get_type_hints(schema)[part]
        node = node._get_node(part)
    return declared


def union_members(declared: Any) -> tuple[Any, ...]:
    """Returns the members of a union type; of another type, the type itself."""
    return get_args(declared) if get_origin(declared) in (Union, UnionType) else (declared,)


def enum_values(declared: Any) -> dict[str, str]:
    """Returns value to name of an enum's members, without null; empty for other types."""
    return {
        str(member.value): member.name
        for kind in union_members(declared)
        if isinstance(kind, type) and issubclass(kind, Enum)
        for member in kind
    }
