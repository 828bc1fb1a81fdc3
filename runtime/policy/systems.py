"""Reads the systems of `configs/system`, for code that names one instead of composing a command."""

from dataclasses import fields
from pathlib import Path

import yaml

from predictors.errors import MoecastError, unknown
from runtime.config import SystemConfig

FOLDER = Path(__file__).resolve().parents[2] / "configs" / "system"

ON_DEMAND = "on-demand"
"""Fetches nothing before a router asks for it: what every comparison is relative to."""
PROMOE = "promoe"
"""The default of every command that serves a model."""


def system_names() -> list[str]:
    """Returns the name of every system, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load_system(name: str) -> SystemConfig:
    """Reads `configs/system/NAME.yaml`; what a command gets from `system=NAME` is equal.

    Raises:
        MoecastError: there is no such system, or its file has an unknown key.
    """
    names = system_names()
    if name not in names:
        raise MoecastError(unknown("system", name, names))
    values = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    values.pop("defaults", None)  # Hydra's: the schema that the keys below are checked against.
    known = [field.name for field in fields(SystemConfig)]
    for key in values:
        if key not in known:
            raise MoecastError(f"{name}.yaml: {unknown('option', key, known)}")
    return SystemConfig(**values)
