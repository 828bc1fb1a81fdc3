"""Writes `--help` from the schemas, their docstrings and the groups' files, without torch."""

import ast
import inspect
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin

from omegaconf import DictConfig, OmegaConf

from configs.choices import group_choices, multi_choice_defaults
from configs.command import Command
from configs.compose import compose_defaults
from configs.errors import ConfigError, unknown_option
from configs.model_choice import GROUP as MODEL
from configs.schema import option_keys, option_type, union_members
from predictors.config import ALL, RunConfig

WIDTH = 100
INDENT = " " * 6
EVERYWHERE = tuple(field.name for field in fields(RunConfig))
"""Options of every command."""
WORDS = {bool: "on/off", int: "number", float: "number", str: "text", Path: "path"}
AMOUNTS = {
    "budget": "a size or a share",
    "host_budget": "a size",
    "kv_budget": "a size",
    "memory": "a size",
    "max_body": "a size",
    "expert_size": "a size",
    "total_size": "a size",
}
"""Options whose text is an amount of memory, such as 4GiB or 50%."""
ENDING = (
    "--config FILE reads options from a YAML file; those of the command line override them.",
    "With -m, several values (key=a,b) make one run of each combination.",
    "Exit codes: 0 done, 1 failed, 2 wrong use, 130 interrupted.",
)


def write_program_help(called: str, commands: Sequence[Command]) -> str:
    """Writes the commands of a program, each with its summary."""
    lines = [f"usage: {called} COMMAND [key=value ...]", "", *list_commands(commands)]
    return "\n".join([*lines, "", f"{called} COMMAND --help lists a command's options.", ""])


def list_commands(commands: Sequence[Command]) -> list[str]:
    width = max(len(command.name) for command in commands)
    lines = []
    for command in commands:
        text = f"  {command.name:{width}}  {command.summary}"
        lines += textwrap.wrap(text, WIDTH, subsequent_indent=" " * (width + 4))
    return lines


def write_command_help(
    called: str, command: Command, topic: str = "", *, others: Sequence[Command] = ()
) -> str:
    """Writes usage, an example and options with type, default and meaning.

    Args:
        called: the program as the user called it.
        command: the command.
        topic: empty for the basic options, `all`, or an option or a group.
        others: commands of the same program, which has this one as its default.

    Raises:
        ConfigError: there is no option or group `topic`.
    """
    page = CommandHelp(command)
    usage = " ".join(filter(None, (called, command.name)))
    if topic and topic != ALL:
        return "\n".join([*page.describe(topic.replace("-", "_")), ""])
    bare = "".join(f" [{name.upper()}]" for name in command.positional)
    lines = [f"usage: {usage}{bare} [key=value ...]", "", *textwrap.wrap(command.summary, WIDTH)]
    if command.example:
        lines += ["", "example:", f"  {usage} {command.example}"]
    shown = page.all_keys() if topic == ALL else page.basic_keys()
    if shown:
        lines += ["", "options (key=value, or --key value; a group takes one of its choices):"]
    for key in shown:
        lines += page.describe(key) if topic == ALL else page.summarise(key)
    if topic == ALL:
        lines += ["", "options of every command:"]
        for key in EVERYWHERE:
            lines += page.describe(key)
        lines += ["", *ENDING]
    else:
        lines += [
            "",
            f"{usage} --help all lists every option; --help NAME explains one or a group.",
        ]
    if others:
        lines += ["", f"other commands ({usage} COMMAND --help):", *list_commands(others)]
    return "\n".join([*lines, ""])


class CommandHelp:
    """The options of one command."""

    def __init__(self, command: Command):
        self.command = command
        self.config, self.groups = compose_defaults(command.config)
        self.several = multi_choice_defaults(command.config)

    def all_keys(self) -> list[str]:
        """Returns all options and groups in the order of the schema, the model first."""
        keys = [key for key in map(str, self.config) if key not in EVERYWHERE]
        return sorted(keys, key=lambda key: (key != MODEL, self.is_group(key)))

    def basic_keys(self) -> Sequence[str]:
        return self.command.basic or self.all_keys()

    def is_group(self, key: str) -> bool:
        return key in self.several or key in self.groups.chosen

    def summarise(self, key: str) -> list[str]:
        """Returns the lines of an option, or the choices of a group."""
        if key in self.several:
            choices = f"{', '.join(group_choices(key))}; several, or all = {self.several[key]}"
        elif key in self.groups.chosen:
            forms = "a folder, ORG/NAME, or " if key == MODEL else ""
            choices = f"{forms}{', '.join(self.groups.choices[key])} = {self.groups.chosen[key]}"
        else:
            return self.describe(key)
        return [*wrap_choices(f"{key}  {choices}"), *wrap_meaning(self.meaning(key))]

    def describe(self, key: str) -> list[str]:
        """Returns the lines of an option, or the choices and the options of a group.

        Raises:
            ConfigError: there is none of this name.
        """
        try:
            option_type(self.config, key)
        except KeyError:
            known = {*option_keys(self.config), *self.groups.chosen}
            raise ConfigError(unknown_option(key, known)) from None
        lines = self.summarise(key) if self.is_group(key) else []
        return lines if key in self.several else [*lines, *self.format_node(key)]

    def format_node(self, key: str) -> Iterator[str]:
        """Yields `key  type = default` and the meaning of an option, or of those of a group."""
        parent, _, name = key.rpartition(".")
        config = OmegaConf.select(self.config, parent) if parent else self.config
        node = config._get_node(name)
        if isinstance(node, DictConfig) and is_dataclass(OmegaConf.get_type(node)):
            for part in map(str, node):
                yield from self.format_node(f"{key}.{part}")
            return
        kind = describe_type(name, option_type(self.config, key))
        yield f"  {key}  {kind} {default_text(config, name)}".rstrip()
        yield from wrap_meaning(self.meaning(key))

    def meaning(self, key: str) -> str:
        """Returns the docstring of an option."""
        parent, _, name = key.rpartition(".")
        config = OmegaConf.select(self.config, parent) if parent else self.config
        schema = OmegaConf.get_type(config)
        return field_docstrings(schema).get(name, "") if is_dataclass(schema) else ""


def wrap_choices(text: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent="  ", subsequent_indent=INDENT, break_on_hyphens=False
    )


def wrap_meaning(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT)


def describe_type(name: str, declared: Any) -> str:
    """Returns the type of an option in words; an enum by its values."""
    if name in AMOUNTS:
        return AMOUNTS[name]
    words = []
    for kind in union_members(declared):
        if isinstance(kind, type) and issubclass(kind, Enum):
            words.append(", ".join(str(member.value) for member in kind))
        elif get_origin(kind) is list:
            words.append(f"{WORDS.get(get_args(kind)[0], 'text')}, several with commas")
        elif get_origin(kind) is dict:
            words.append("{name: value}")
        elif kind is not NoneType:
            words.append(WORDS.get(kind, "text"))
    return " or ".join(words)


def default_text(config: DictConfig, key: str) -> str:
    """Returns the default of an option as the user would write it."""
    if OmegaConf.is_missing(config, key):
        return "(required)"
    value: Any = config[key]
    if OmegaConf.is_config(value):
        value = OmegaConf.to_container(value)
    if isinstance(value, list):
        value = ",".join(map(str, value)) or None
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, bool):
        value = str(value).lower()
    return "" if value is None or value == {} else f"= {value}"


@cache
def field_docstrings(schema: type) -> dict[str, str]:
    """Returns the docstring below each field of a dataclass and its bases, as one line."""
    texts: dict[str, str] = {}
    for owner in reversed(schema.__mro__):
        if not is_dataclass(owner):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, text in zip(body.body, body.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
                and isinstance(text.value.value, str)
            ):
                texts[field.target.id] = " ".join(text.value.value.split())
    return texts
