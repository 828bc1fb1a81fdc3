"""From YAML to plain values, and from these to the dataclass that declares them.

YAML is that of the presets of `configs`, of files of options, and of values such as `{capacity:
256}`. The one check of all options is here.

An option's type is that of its field. Where a field is a dataclass, its own fields are options with
a dotted key (`model.dtype`); the keys below a dictionary are for its owner to check.
"""

import math
import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml

from predictors.errors import ConfigError, unknown, unknown_option
from predictors.files import expand_home

MOST_VALUES = 100_000
"""Values of a document at most, each counted as often as aliases repeat it."""
FLOAT = re.compile(r"[-+]?(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][-+]?\d+)?$")
"""Also `1e-3` and `32.0e9`, which YAML 1.1 takes for texts."""
KINDS = ("null", "bool", "int", "float", "str", "seq", "map")
"""Types of a document's values: no dates, no bytes and no objects."""


class StrictLoader(yaml.SafeLoader):
    """Refuses a key that is given twice, and all but plain values."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Returns a mapping, whose keys are texts or numbers."""
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.value in seen:
                reason = "found a key twice, or one that is no text"
                raise yaml.constructor.ConstructorError(None, None, reason, key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


StrictLoader.yaml_constructors = {
    tag: construct
    for tag, construct in yaml.SafeLoader.yaml_constructors.items()
    if tag is None or tag.rpartition(":")[2] in KINDS
}
StrictLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if tag.rpartition(":")[2] != "timestamp"]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
StrictLoader.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, list("-+0123456789."))


table_loader: type[StrictLoader] = StrictLoader
if yaml.__with_libyaml__:

    class CStrictLoader(yaml.cyaml.CParser, StrictLoader):
        """Builds the same values ten times faster, with other messages about faults."""

        def __init__(self, stream: Any):
            yaml.cyaml.CParser.__init__(self, stream)
            yaml.constructor.SafeConstructor.__init__(self)
            yaml.resolver.Resolver.__init__(self)

    table_loader = CStrictLoader


def read_table(path: Path) -> Any:
    """Returns the values of a YAML file that is part of the program."""
    return yaml.load(path.read_bytes(), Loader=table_loader)


def read_yaml(text: Any) -> Any:
    """Returns the values of a text or an open file.

    Raises:
        ValueError: it is no YAML, nested too deeply, or has more than `MOST_VALUES` values.
    """
    try:
        values = yaml.load(text, Loader=StrictLoader)
    except yaml.YAMLError as error:
        raise ValueError(f"not YAML: {' '.join(str(error).split())}") from error
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None
    left, count = [values], 0
    while left and count <= MOST_VALUES:
        value = left.pop()
        parts = list(value.values()) if isinstance(value, Mapping) else value
        if isinstance(parts, list):
            count += len(parts)
            left += parts
    if count > MOST_VALUES:
        raise ValueError(f"more than {MOST_VALUES:,} values, aliases included")
    return values


LARGEST = 2**63 - 1
"""Largest absolute value of a whole number: it must fit in 64 bits."""


def is_schema(declared: Any) -> bool:
    """Whether options of this type have options of their own."""
    return isinstance(declared, type) and is_dataclass(declared)


@cache
def field_types(schema: Any) -> dict[str, Any]:
    """Returns the type of each field of a dataclass, in the order of declaration."""
    hints = get_type_hints(schema)
    return {field.name: hints[field.name] for field in fields(schema)}


def union_members(declared: Any) -> tuple[Any, ...]:
    """Returns the members of a union type; of another type, the type itself."""
    return get_args(declared) if get_origin(declared) in (Union, UnionType) else (declared,)


def is_text(declared: Any) -> bool:
    """Whether options of this type are texts or paths, which are taken as they stand."""
    return bool({str, Path} & set(union_members(declared)))


def option_keys(schema: type, prefix: str = "") -> Iterator[str]:
    """Yields the dotted keys of a dataclass in the order of declaration."""
    for name, declared in field_types(schema).items():
        if is_schema(declared):
            yield from option_keys(declared, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def option_type(schema: type, key: str) -> Any:
    """Returns the declared type of a dotted key; KeyError if there is none."""
    declared: Any = schema
    for part in key.split("."):
        if get_origin(declared) is dict:
            declared = get_args(declared)[1]
        elif is_schema(declared):
            declared = field_types(declared)[part]
        elif declared is not Any:
            raise KeyError(key)
    return declared


def default_values(schema: type) -> dict[str, Any]:
    """Returns the defaults of a dataclass in nested dictionaries; nothing for required fields."""
    values: dict[str, Any] = {}
    for field in fields(schema):
        declared = field_types(schema)[field.name]
        if is_schema(declared):
            values[field.name] = default_values(declared)
        elif field.default_factory is not MISSING:
            values[field.name] = field.default_factory()
        elif field.default is not MISSING:
            values[field.name] = field.default
    return values


def set_value(values: dict[str, Any], schema: type, key: str, value: Any) -> None:
    """Sets an option, given by its dotted key, or several by a mapping of a dataclass's fields.

    A dictionary is added to the one that is there.

    Raises:
        ConfigError: there is no such option, or the value is none of its type.
    """
    try:
        declared = option_type(schema, key)
    except KeyError:
        raise ConfigError(unknown_option(key, option_keys(schema))) from None
    if is_schema(declared):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{key}={value}: must be options, as in {{NAME: VALUE}}")
        for name, part in value.items():
            set_value(values, schema, f"{key}.{name}", part)
        return
    *parents, name = key.split(".")
    node = values
    for parent in parents:
        node = node.setdefault(parent, {})
        if not isinstance(node, dict):
            raise ConfigError(unknown_option(key, option_keys(schema)))
    node[name] = merge(node.get(name), convert(key, value, declared))


def merge(old: Any, new: Any) -> Any:
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    return old | {key: merge(old.get(key), value) for key, value in new.items()}


def convert(key: str, value: Any, declared: Any) -> Any:
    """Returns a value as its declared type; ConfigError if it is none."""
    members = union_members(declared)
    if isinstance(value, str) and is_text(declared):
        text: Any = value if str in members else expand_home(value)
        check_parts(key, text)
        return text
    if get_origin(declared) is list and not isinstance(value, list):
        value = [word.strip() for word in value.split(",")] if isinstance(value, str) else [value]
    for member in members:
        if isinstance(member, type) and issubclass(member, Enum) and value is not None:
            choices = {str(one.value): one for one in member}
            if str(value) not in choices:
                raise ConfigError(unknown(key, str(value), choices))
            return choices[str(value)]
    if isinstance(value, bool) and {int, float} & set(members):
        raise ConfigError(f"{key}={value}: must be a number")
    if not is_converted(value, declared):
        value = validate(key, value, declared)
    check_parts(key, value)
    return value


def is_converted(value: Any, declared: Any) -> bool:
    """Whether a value plainly is of its declared type, as those of our own YAML are.

    A process that serves then imports no pydantic, which takes 4 MiB.
    """
    if get_origin(declared) is dict and get_args(declared) == (str, Any):
        return isinstance(value, dict) and all(isinstance(name, str) for name in value)
    return type(value) in {bool, int, float, NoneType} & set(union_members(declared))


def validate(key: str, value: Any, declared: Any) -> Any:
    """Returns a value as pydantic converts it to its declared type; ConfigError if it is none."""
    from pydantic import ConfigDict, TypeAdapter, ValidationError

    adapter = TypeAdapter(declared, config=ConfigDict(coerce_numbers_to_str=True))
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        reason = error.errors()[0]["msg"].replace("Input should be", "must be")
        hint = "; several values need -m" if isinstance(value, str) and "," in value else ""
        raise ConfigError(f"{key}={shorten(value)}: {reason}{hint}") from None


def shorten(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def check_parts(key: str, value: Any) -> None:
    """Raises ConfigError for a number or text, at any depth, that no program could take."""
    if isinstance(value, Mapping):
        for name, part in value.items():
            check_parts(f"{key}.{name}", part)
    elif isinstance(value, list):
        for part in value:
            check_parts(key, part)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{key}={value}: must be a finite number")
    elif isinstance(value, int) and abs(value) > LARGEST:
        raise ConfigError(f"{key}={value}: must fit in 64 bits, {LARGEST} at most")
    elif isinstance(value, str | Path) and "\0" in str(value):
        raise ConfigError(f"{key}: the text has a null character, which is not allowed")
    elif isinstance(value, str):  # a path may have bytes that are not UTF-8, as file names may
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ConfigError(f"{key}: the text is not valid UTF-8") from None


def build(schema: Any, values: Mapping[str, Any], prefix: str = "") -> Any:
    """Returns the dataclass of typed values; building it runs its checks across fields.

    Raises:
        ConfigError: an option without a value.
    """
    parts = {}
    for name, declared in field_types(schema).items():
        if name not in values:
            raise ConfigError(f"{prefix}{name}=... is required; give it on the command line")
        value = values[name]
        if is_schema(declared):
            value = build(declared, value, f"{prefix}{name}.")
        elif is_schema(member := (get_args(declared) or (None,))[0]):
            value = [build(member, one, f"{prefix}{name}.") for one in value]
        parts[name] = deepcopy(value)
    return schema(**parts)
