"""Reads YAML: the presets of `configs`, files of options, and values such as `{capacity: 256}`."""

import re
from collections.abc import Mapping
from typing import Any

import yaml

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
