"""What a child process is asked to answer, as JSON."""

import dataclasses
import json
from enum import Enum, StrEnum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from runtime.config import VerifyConfig


class Side(StrEnum):
    """Who answers."""

    SERVED = "served"
    """The model as moecast serves it."""
    PLAIN = "plain"
    """Transformers with every expert in memory."""
    LAZY = "lazy"
    """Transformers' own loop over experts that are read one at a time."""


@dataclasses.dataclass(kw_only=True)
class Request:
    side: Side
    config: VerifyConfig
    budget: str
    """For `served`; the others have none."""
    prompts: list[list[int]]
    """Token ids."""
    output: Path
    """Folder for the answers and `report.json`."""


def dumped(request: Request) -> str:
    """The request as text."""
    return json.dumps(dataclasses.asdict(request), default=str)


def loaded(text: str) -> Request:
    """The request from its text."""
    return revived(Request, json.loads(text))


def revived(kind: Any, tree: Any) -> Any:
    """A value of the declared type from plain JSON: dataclasses, paths and enumerations again."""
    if get_origin(kind) in (Union, UnionType):
        if tree is None:
            return None
        kind = next(one for one in get_args(kind) if one is not NoneType)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        return kind(**{name: revived(hints[name], value) for name, value in tree.items()})
    if isinstance(kind, type) and issubclass(kind, Path | Enum):
        return kind(tree)
    return tree
