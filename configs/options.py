"""Options as text on the command line and as values in a YAML file (`--config FILE`)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from configs.errors import ConfigError, not_an_option


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
        values = OmegaConf.to_container(OmegaConf.load(file))
    except OSError as error:
        raise ConfigError(f"--config {file}: {error.strerror or error}") from error
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {file}: not a YAML file: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"--config {file}: expected options (key: value), got a list")
    return [Option(key=key, value=value, file=file) for key, value in flatten(values)]


def flatten(values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the dotted keys and the values that are no mappings with keys."""
    for name, value in values.items():
        key = f"{prefix}{name}".replace("-", "_")
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{key}.")
        else:
            yield key, value
