"""Reads options: a command line (`key=value`, `--key value`, switches, bare values), YAML files."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from predictors.errors import ConfigError
from predictors.files import path_exists, read_text_file
from predictors.typed_values import read_yaml, union_members

HELP = ("-h", "--help")
MULTIRUN = ("-m", "--multirun")
CONFIG = "--config"
ON_OFF = {"true": True, "on": True, "yes": True, "false": False, "off": False, "no": False}
"""Words that may follow a switch."""


@dataclass(kw_only=True)
class Arguments:
    argv: Sequence[str] = ()
    """The arguments as the user gave them, without the command."""
    options: list[str] = field(default_factory=list)
    """Every option as `key=value`, in the order given."""
    files: list[Path] = field(default_factory=list)
    """YAML files of options."""
    is_sweep: bool = False
    help_topic: str | None = None
    """None: no help; empty: the basic options; else `all` or an option."""


@dataclass(frozen=True, kw_only=True)
class Option:
    key: str
    """Dotted key, such as model.dtype; of a group, its name."""
    value: Any
    """Unparsed text from the command line; a value from a file."""
    file: Path | None = None
    """The file that it is from; None: the command line."""

    @property
    def text(self) -> str:
        """The value as one would write it on the command line."""
        if isinstance(self.value, list):
            return ",".join(map(str, self.value))
        return str(self.value)


def read_arguments(
    argv: Sequence[str], positional: Sequence[str], *, find_type: Callable[[str], Any]
) -> Arguments:
    """Reads the arguments of a command; ConfigError for one that is not an option.

    Bare values set the options `positional`, in this order. `find_type` returns the declared type
    of a key and raises ConfigError if there is no such option; it is called for `--key` only.
    """
    arguments = Arguments(argv=argv)
    bare: list[str] = []
    rest = deque(argv)
    while rest:
        argument = rest.popleft()
        name, equals, value = argument.partition("=")
        if name in HELP:
            arguments.help_topic = value if equals else rest.popleft() if rest else ""
            break
        if argument in MULTIRUN:
            arguments.is_sweep = True
        elif name == CONFIG:
            arguments.files.append(Path(value if equals else take_value(name, rest)))
        elif argument.startswith("--"):
            arguments.options.append(read_flag(argument, rest, find_type))
        elif argument.startswith("-"):
            raise ConfigError(not_an_option(argument))
        elif is_option(argument):
            arguments.options.append(f"{normalise_key(name)}={value}")
        else:
            bare.append(argument)
    arguments.options[:0] = assign_positional(bare, positional, arguments.options)
    return arguments


def read_flag(argument: str, rest: deque[str], find_type: Callable[[str], Any]) -> str:
    """Returns `--key value`, `--key=value`, `--switch` or `--no-switch` as `key=value`.

    Takes the value, if it is a separate argument, from `rest`.
    """
    name, equals, value = argument.removeprefix("--").partition("=")
    key = normalise_key(name)
    if not is_option(f"{key}="):
        raise ConfigError(not_an_option(argument))
    if equals:
        return f"{key}={value}"
    positive = key.removeprefix("no_")
    is_switch = bool in union_members(find_type(positive))
    if positive != key and not is_switch:
        raise ConfigError(f"{argument}: {positive!r} is not on or off; write {positive}=VALUE")
    if not is_switch:
        return f"{key}={take_value(argument, rest)}"
    switched = positive == key
    if switched and rest and rest[0].lower() in ON_OFF:
        switched = ON_OFF[rest.popleft().lower()]
    return f"{positive}={str(switched).lower()}"


def take_value(flag: str, rest: deque[str]) -> str:
    """Takes the value of `--key` from the arguments after it; it may begin with one dash."""
    if not rest or rest[0].startswith("--") or rest[0] in (*HELP, *MULTIRUN):
        raise ConfigError(f"{flag} needs a value; one that begins with a dash as {flag}=VALUE")
    return rest.popleft()


def assign_positional(
    bare: Sequence[str], positional: Sequence[str], options: Sequence[str]
) -> list[str]:
    """Returns bare values as options; ConfigError for one too many, or an option given twice.

    A first value with spaces is no model: in `generate "A text"` it is the prompt.
    """
    names = list(positional)
    if len(names) > 1 and bare and " " in bare[0] and not path_exists(bare[0]):
        del names[0]
    if len(bare) > len(names):
        raise ConfigError(not_an_option(bare[len(names)]))
    given = {option.partition("=")[0] for option in options}
    for name, value in zip(names, bare, strict=False):
        if name in given:
            raise ConfigError(f"{name} is given twice: as {value!r} and as {name}=...")
    return [f"{name}={value}" for name, value in zip(names, bare, strict=False)]


def is_option(argument: str) -> bool:
    """Whether an argument has a key before its first `=`."""
    key, equals, _ = argument.partition("=")
    return bool(equals) and normalise_key(key).replace(".", "").isidentifier()


def normalise_key(key: str) -> str:
    return key.lstrip("+").replace("-", "_")


def not_an_option(argument: str) -> str:
    return f"{argument!r} is not an option: write key=value; --help lists the options"


def read_options(arguments: Sequence[str], files: Sequence[Path]) -> list[Option]:
    """Returns the options of files and command line in the order in which they apply."""
    options = [option for file in files for option in read_option_file(file)]
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals or not key:
            raise ConfigError(not_an_option(argument))
        options.append(Option(key=key, value=value))
    return options


def read_option_file(file: Path) -> list[Option]:
    """Reads a YAML file of options with nested or dotted keys; ConfigError if it is not one."""
    try:
        values = read_yaml(read_text_file(file))
    except OSError as error:
        raise ConfigError(f"--config {file}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"--config {file}: {error}") from error
    if not isinstance(values, dict | None):
        raise ConfigError(f"--config {file}: expected options (key: value), got a list")
    return [Option(key=key, value=value, file=file) for key, value in flatten(values or {})]


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the dotted keys and the values that are no mappings with keys."""
    for name, value in values.items():
        key = f"{prefix}{name}".replace("-", "_")
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{key}.")
        else:
            yield key, value
