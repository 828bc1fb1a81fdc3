"""Reads the choices of `configs/GROUP/NAME.yaml`: systems, models, machines, shapes and others.

They are what `system=NAME` and `model=NAME` mean on the command line, and in Python.
"""

import shlex
from functools import cache
from pathlib import Path
from typing import Any

from predictors.errors import ConfigError, MoecastError, unknown
from predictors.files import expand_home
from predictors.typed_values import build, default_values, read_yaml, set_value
from runtime.config import GGUF, HardwareConfig, ModelConfig, ShapeConfig, SystemConfig
from runtime.errors import CheckpointError

FOLDER = Path(__file__).resolve().parents[1] / "configs"
EXTENDS = "extends"
"""Key of a file whose values are over those of another choice."""

DEFAULT_SYSTEM = "moecast"
"""The system of commands that serve a model, and of `load`."""
ON_DEMAND = "on-demand"
"""The system without prefetching: the baseline of every comparison."""
PROMOE = "promoe"
"""The system of ProMoE, whose techniques `bench ablation=true` turns off one by one."""


def model_names() -> list[str]:
    return choice_names("model")


def load_system(name: str) -> SystemConfig:
    """Reads `configs/system/NAME.yaml`, as `system=NAME` does on the command line.

    Raises:
        MoecastError: There is no such system, or its file has an unknown key.
    """
    return build(SystemConfig, read_choice("system", name, SystemConfig))


def load_model_preset(name: str) -> ModelConfig:
    """Reads `configs/model/NAME.yaml`, as `model=NAME` does on the command line.

    Raises:
        MoecastError: There is no such model, or its file has an unknown key.
    """
    return build(ModelConfig, read_choice("model", name, ModelConfig))


def load_hardware(name: str) -> HardwareConfig:
    """Reads `configs/hardware/NAME.yaml`, as `hardware=NAME` does on the command line.

    Raises:
        MoecastError: There is no such machine, or its file has an unknown key.
    """
    return build(HardwareConfig, read_choice("hardware", name, HardwareConfig))


def load_shape(name: str) -> ShapeConfig:
    """Reads `configs/shape/NAME.yaml`, as `shape=NAME` does on the command line.

    Raises:
        MoecastError: There is no such shape, or its file has an unknown key.
    """
    return build(ShapeConfig, read_choice("shape", name, ShapeConfig))


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
    """Returns the arguments that choose a model and its dtype in a shell's command line."""
    name = model.name if model.name in model_names() else model.id
    usual = find_model(name).dtype
    words = [f"model={name}" if "=" in name else name]
    return shlex.join(words if model.dtype == usual else [*words, f"model.dtype={model.dtype}"])


def choice_names(group: str) -> list[str]:
    return sorted(path.stem for path in (FOLDER / group).glob("*.yaml"))


def is_variant(group: str, name: str) -> bool:
    """Whether a choice's file extends that of another choice."""
    return EXTENDS in _read_file(group, name)


def read_choice(group: str, name: str, schema: type) -> dict[str, Any]:
    """Returns all values of a choice, checked: its own over those of the choice that it extends.

    Raises:
        MoecastError: There is no such choice, or its file does not match the schema.
    """
    if name not in (names := choice_names(group)):
        raise MoecastError(unknown(group, name, names))
    own = _read_file(group, name)
    base = own.get(EXTENDS)
    values = default_values(schema) if base is None else read_choice(group, base, schema)
    try:
        for key, value in own.items():
            if key != EXTENDS:
                set_value(values, schema, key, value)
    except ConfigError as error:
        raise ConfigError(f"{name}.yaml: {error}") from error
    return values


@cache
def _read_file(group: str, name: str) -> dict[str, Any]:
    values: dict[str, Any] = read_yaml((FOLDER / group / f"{name}.yaml").read_text())
    return values
