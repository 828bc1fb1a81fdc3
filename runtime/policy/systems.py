"""Reads the systems of `configs/system`, the only place where they are defined."""

from dataclasses import fields
from pathlib import Path

import yaml

from predictors.errors import MoecastError, unknown
from runtime.config import SystemConfig

FOLDER = Path(__file__).resolve().parents[2] / "configs" / "system"

ON_DEMAND = "on-demand"
"""The system without prefetching: the baseline of every comparison."""
PROMOE = "promoe"
"""The default system of commands that serve a model."""


def system_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load_system(name: str) -> SystemConfig:
    """Reads `configs/system/NAME.yaml`, as `system=NAME` does on the command line.

    Raises:
        MoecastError: There is no such system, or its file has an unknown key.
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
