"""Options of every command and of predictors; options that are chosen by name."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from predictors.errors import MoecastError

ALL = "all"
"""Stands for every kind."""

GROUP = "group"
"""Key of a field's metadata: the `ChoiceGroup` that the option's values are chosen from."""

SECRET = "secret"
"""Key of a field's metadata: the option's value must not be written to a file or log."""


@dataclass(frozen=True, kw_only=True)
class ChoiceGroup:
    """Values with names: the files of `configs/FOLDER/`."""

    folder: str
    default: str
    """The default choice; of several, names with commas between them, or `all`."""
    values: Mapping[str, Any]
    """Values over those of the default choice."""


def chosen(schema: type, folder: str, default: str, **values: Any) -> Any:
    """Declares the field of a dataclass whose values are chosen by name, `FIELD=NAME`."""
    group = ChoiceGroup(folder=folder, default=default, values=values)
    return field(default_factory=schema, metadata={GROUP: group})


def several(folder: str, default: str = ALL) -> Any:
    """Declares the field of a list that takes several choices, `FIELD=A,B` or `all`."""
    group = ChoiceGroup(folder=folder, default=default, values={})
    return field(default_factory=list, metadata={GROUP: group})


def require_at_least(config: Any, prefix: str = "", /, **least: float) -> None:
    """Raises MoecastError for the first option below its least value; None is none.

    Messages name options with the prefix.
    """
    for name, number in least.items():
        value = getattr(config, name)
        if value is not None and value < number:
            raise MoecastError(f"{prefix}{name}={value}: must be at least {number}")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Base of every command's configuration."""

    run_dir: Path | None = None
    """Folder for results.json, run.json and other output. Only training, evaluation and bench make
    one unasked, runs/COMMAND/TIME (UTC)."""
    debug: bool = False
    """Print tracebacks of errors."""
    seed: int = 0
    """Seed of every random choice."""


@dataclass(frozen=True, kw_only=True)
class PredictorConfig:
    kind: str = "residual"
    """Kind of predictor (see predictors/registry.py), or all."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of that kind, such as `{capacity: 256}`: keyword arguments of its class."""
    int8: bool = True
    """Export networks with int8 weights, a quarter of float32's bytes, for about .001 of accuracy.
    """
    width: int = 512
    """Hidden units of each published network; residual and reuse have their own."""

    def __post_init__(self) -> None:
        require_at_least(self, "predictor.", width=1)
