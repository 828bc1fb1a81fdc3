"""Reads the presets of `configs`: systems, models, machines and shapes, which are defined there.

They are what `system=NAME` and `model=NAME` mean on the command line, and in Python.
"""

from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from predictors.errors import MoecastError, unknown
from predictors.files import expand_home
from runtime.config import GGUF, HardwareConfig, ModelConfig, ShapeConfig, SystemConfig
from runtime.errors import CheckpointError

FOLDER = Path(__file__).resolve().parents[1] / "configs"

DEFAULT_SYSTEM = "moecast"
"""The system of commands that serve a model, and of `load`."""
ON_DEMAND = "on-demand"
"""The system without prefetching: the baseline of every comparison."""
PROMOE = "promoe"
"""The system of ProMoE, whose techniques `bench ablation=true` turns off one by one."""


def system_names() -> list[str]:
    return _names("system")


def model_names() -> list[str]:
    return _names("model")


def load_system(name: str) -> SystemConfig:
    """Reads `configs/system/NAME.yaml`, as `system=NAME` does on the command line.

    Raises:
        MoecastError: There is no such system, or its file has an unknown key.
    """
    return _read("system", name, SystemConfig)


def load_model_preset(name: str) -> ModelConfig:
    """Reads `configs/model/NAME.yaml`, as `model=NAME` does on the command line.

    Raises:
        MoecastError: There is no such model, or its file has an unknown key.
    """
    return _read("model", name, ModelConfig)


def load_hardware(name: str) -> HardwareConfig:
    """Reads `configs/hardware/NAME.yaml`, as `hardware=NAME` does on the command line.

    Raises:
        MoecastError: There is no such machine, or its file has an unknown key.
    """
    return _read("hardware", name, HardwareConfig)


def load_shape(name: str) -> ShapeConfig:
    """Reads `configs/shape/NAME.yaml`, as `shape=NAME` does on the command line.

    Raises:
        MoecastError: There is no such shape, or its file has an unknown key.
    """
    return _read("shape", name, ShapeConfig)


def find_model(model: str | Path) -> ModelConfig:
    """Returns the configuration of a preset, a folder, a GGUF file or a Hub id, in this order.

    A folder that has a preset's name is given as `./NAME`. The Hub id of a preset is that preset.
    Whether a folder or a repository exists is checked when it is loaded.

    Raises:
        CheckpointError: It is a word that is none of them; the message has the presets.
    """
    text, folder = str(model), expand_home(model)
    is_gguf = folder.suffix == GGUF and folder.is_file()
    if (folder.is_dir() or is_gguf) and text not in model_names():
        return ModelConfig(name=folder.resolve().name.removesuffix(GGUF), id=text)
    for preset in map(load_model_preset, model_names()):
        if text in (preset.name, preset.id):
            return preset
    if isinstance(model, Path) or "/" in text or text.startswith((".", "~")):
        return ModelConfig(name=folder.name, id=text)
    raise CheckpointError(
        f"{unknown('model', text, model_names())}. Or give a folder (./{text}) or a repository of "
        "the Hub (ORG/NAME)"
    )


def describe_choice(model: ModelConfig) -> str:
    """Returns the arguments that choose a model and its dtype on the command line."""
    name = model.name if model.name in model_names() else model.id
    usual = find_model(name).dtype
    return name if model.dtype == usual else f"{name} model.dtype={model.dtype}"


def _names(group: str) -> list[str]:
    return sorted(path.stem for path in (FOLDER / group).glob("*.yaml"))


def _read_values(group: str, name: str) -> dict[str, Any]:
    """Returns a preset's values over those of the preset that it builds on, as Hydra does."""
    values: dict[str, Any] = yaml.safe_load((FOLDER / group / f"{name}.yaml").read_text())
    for default in values.pop("defaults", []):
        if not default.startswith("/"):  # else the schema, which checks the keys below
            values = {**_read_values(group, default), **values}
    return values


def _read(group: str, name: str, schema: Any) -> Any:
    names = _names(group)
    if name not in names:
        raise MoecastError(unknown(group, name, names))
    values = _read_values(group, name)
    types = {field.name: field.type for field in fields(schema)}
    for key, value in values.items():
        if key not in types:
            raise MoecastError(f"{name}.yaml: {unknown('option', key, types)}")
        if types[key] is float:
            values[key] = float(value)  # PyYAML reads 32.0e9 as text, Hydra as a number
    return schema(**values)
