"""Writes `--help` from the schemas, their docstrings and the groups' files, without torch."""

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin

from configs.commands import Command
from configs.compose import MODEL, compose_defaults, declared_type, find_groups, takes_several
from predictors.config import ALL, RunConfig
from predictors.typed_values import field_types, is_schema, option_type, union_members
from runtime.presets import choice_names

WIDTH = 100
INDENT = " " * 6
EVERYWHERE = tuple(field.name for field in fields(RunConfig))
"""Options of every command."""
WORDS = {bool: "on/off", int: "number", float: "number", str: "text", Path: "path"}
AMOUNTS = dict.fromkeys(
    ("host_budget", "kv_budget", "memory", "max_body", "expert_size", "total_size"), "a size"
) | {"budget": "a size or a share"}
"""Options whose text is an amount of memory, such as 4GiB or 50%."""
REQUIRED = "(required)"
"""In place of a default."""
LONGEST_DEFAULT = 100
"""Characters of a list; of a longer one, only the number of its parts is shown."""
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
    called: str, command: Command, schema: type, topic: str = "", *, others: Sequence[Command] = ()
) -> str:
    """Writes usage, an example and options with type, default and meaning.

    Args:
        called: the program as the user called it.
        command: the command.
        schema: the dataclass of its options.
        topic: empty for the basic options, `all`, or an option or a group.
        others: commands of the same program, which has this one as its default.

    Raises:
        ConfigError: there is no option or group `topic`.
    """
    page = CommandHelp(schema)
    usage = " ".join(filter(None, (called, command.name)))
    if topic and topic != ALL:
        return "\n".join([*page.describe(topic.replace("-", "_")), ""])
    bare = "".join(f" [{name.upper()}]" for name in command.positional)
    lines = [f"usage: {usage}{bare} [key=value ...]", "", *textwrap.wrap(command.summary, WIDTH)]
    if command.example:
        lines += ["", "example:", f"  {usage} {command.example}"]
    shown = command.basic if command.basic and topic != ALL else page.keys()
    if shown:
        lines += ["", "options (key=value, or --key value; a group takes one of its choices):"]
    for key in shown:
        lines += page.describe(key, is_whole=topic == ALL)
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

    def __init__(self, schema: type):
        self.schema = schema
        self.groups = find_groups(schema)
        self.values = compose_defaults(schema)

    def keys(self) -> list[str]:
        """Returns all options and groups in the order of the schema, the model first."""
        keys = [key for key in field_types(self.schema) if key not in EVERYWHERE]
        return sorted(keys, key=lambda key: (key != MODEL, key in self.groups))

    def describe(self, key: str, *, is_whole: bool = True) -> list[str]:
        """Returns the lines of an option, or the choices of a group.

        If `is_whole`, the options of a group follow, unless it takes several choices.

        Raises:
            ConfigError: there is none of this name.
        """
        declared_type(self.schema, key)
        if key not in self.groups:
            return list(self.format_option(key))
        group, is_list = self.groups[key], takes_several(self.schema, key)
        choices = ", ".join(choice_names(group.folder))
        if is_list:
            choices += "; several, or all"
        elif key == MODEL:
            choices = f"a folder, ORG/NAME, or {choices}"
        lines = textwrap.wrap(
            f"  {key}  {choices} = {group.default}",
            WIDTH,
            subsequent_indent=INDENT,
            break_on_hyphens=False,
        )
        lines += wrap_meaning(find_meaning(self.schema, key))
        return lines if is_list or not is_whole else [*lines, *self.format_option(key)]

    def format_option(self, key: str) -> Iterator[str]:
        """Yields `key  type = default` and the meaning of an option, or of those of a group."""
        declared = option_type(self.schema, key)
        if is_schema(declared):
            for part in field_types(declared):
                yield from self.format_option(f"{key}.{part}")
            return
        name = key.rpartition(".")[2]
        default = default_text(self.values, key)
        default = f"= {default}" if default and default != REQUIRED else default
        yield f"  {key}  {describe_type(name, declared)} {default}".rstrip()
        yield from wrap_meaning(find_meaning(self.schema, key))


def find_meaning(schema: type, key: str) -> str:
    """Returns the docstring of an option."""
    parent, _, name = key.rpartition(".")
    owner = option_type(schema, parent) if parent else schema
    return field_docstrings(owner).get(name, "") if is_schema(owner) else ""


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


def default_text(values: Mapping[str, Any], key: str) -> str:
    """Returns the default of an option as the user would write it."""
    value: Any = values
    for part in key.split("."):
        if part not in value:
            return REQUIRED
        value = value[part]
    if isinstance(value, list):
        text = ",".join(map(str, value))
        value = text if len(text) <= LONGEST_DEFAULT else f"{len(value)} texts"
        value = value or None
    if isinstance(value, bool):
        value = str(value).lower()
    return "" if value is None or value == {} else str(value)


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
