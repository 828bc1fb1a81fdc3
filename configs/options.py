"""Options as text on the command line and as values in a YAML file (`--config FILE`)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf._utils import get_yaml_loader

from configs.errors import ConfigError, not_an_option
from zoo.digest import refuse_pipes
from zoo.errors import ZooError

MOST_VALUES = 100_000
"""Values of a file of options at most."""


@dataclass(frozen=True, kw_only=True)
class Option:
    key: str
    """Dotted key, such as model.dtype; of a group, its name."""
    value: Any
    """Unparsed text from the command line; elsewhere, a value."""
    file: Path | None = None
    """The file that it is from; None: the command line."""

    @property
    def text(self) -> str:
        """The value as one would write it on the command line."""
        if isinstance(self.value, list | tuple):
            return ",".join(map(str, self.value))
        return str(self.value)


def split_option(argument: str) -> Option:
    """Splits `key=value`; ConfigError if the argument is not an option."""
    key, equals, value = argument.partition("=")
    if not equals or not key:
        raise ConfigError(not_an_option(argument))
    return Option(key=key.lstrip("+"), value=value)


def read_options(arguments: Sequence[str], files: Sequence[Path]) -> list[Option]:
    """Returns the options of files and command line in the order in which they apply."""
    options = [option for file in files for option in read_option_file(file)]
    return options + list(map(split_option, arguments))


def read_option_file(file: Path) -> list[Option]:
    """Reads a YAML file of options with nested or dotted keys; ConfigError if it is not one."""
    try:
        with refuse_pipes(file).open(encoding="utf-8") as stream:
            # OmegaConf's safe loader, a subclass of yaml.SafeLoader: numbers such as 1e-3 and
            # repeated keys are read as in configs/. OmegaConf.load would resolve ${...} in texts.
            values = yaml.load(stream, Loader=get_yaml_loader())
    except (OSError, ZooError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--config {file}: {reason}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"--config {file}: not a YAML file: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"--config {file}: its values are nested too deeply") from error
    if values is None:
        return []
    if not isinstance(values, dict):
        raise ConfigError(f"--config {file}: expected options (key: value), got a list")
    if exceeds_size(values):
        raise ConfigError(f"--config {file}: more than {MOST_VALUES:,} values, aliases included")
    return [Option(key=key, value=value, file=file) for key, value in flatten(values)]


def exceeds_size(values: Any) -> bool:
    """Whether a tree has too many values, each counted as often as aliases repeat it."""
    left, count = [values], 0
    while left and count <= MOST_VALUES:
        value = left.pop()
        parts = list(value.values()) if isinstance(value, Mapping) else value
        if isinstance(parts, list):
            count += len(parts)
            left += parts
    return count > MOST_VALUES


def flatten(values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the dotted keys and the values that are no mappings with keys."""
    for name, value in values.items():
        key = f"{prefix}{name}".replace("-", "_")
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{key}.")
        else:
            yield key, value
