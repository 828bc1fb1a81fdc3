"""`--help`: from the schemas, their docstrings and the files of the groups. Imports no torch."""

import ast
import inspect
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

from omegaconf import DictConfig, OmegaConf

from configs.command import Command
from configs.compose import Groups, choices_of, defaults, several_of
from configs.schema import spelled, type_of
from predictors.config import RunConfig

WIDTH = 100


def program_help(program: str, commands: Sequence[Command]) -> str:
    """The commands of a program, one a line."""
    command = "[COMMAND]" if any(not one.name for one in commands) else "COMMAND"
    lines = [f"usage: python -m {program} {command} [key=value ...]", ""]
    width = max(len(command.name) for command in commands)
    lines += [
        f"  {command.name or '(none)':{max(width, 6)}}  {command.summary}" for command in commands
    ]
    lines += ["", f"python -m {program} COMMAND --help lists a command's options.", ""]
    if any(not command.name for command in commands):
        alone = next(command for command in commands if not command.name)
        return "\n".join(lines) + "\n" + command_help(program, alone)
    return "\n".join(lines)


def command_help(program: str, command: Command) -> str:
    """Usage, then every option with its type, default and meaning, and the groups' choices."""
    config, groups = defaults(command.config)
    first = f" [{command.positional.upper()}]" if command.positional else ""
    called = " ".join(filter(None, ("python -m", program, command.name)))
    lines = [f"usage: {called}{first} [key=value ...]", "", *textwrap.wrap(command.summary, WIDTH)]
    everywhere = [field.name for field in fields(RunConfig)]
    grouped = [key for key in map(str, config) if key in groups.chosen]
    several = several_of(command.config)
    own = [key for key in map(str, config) if key not in (*everywhere, *grouped, *several)]
    lines += ["", "options (key=value):", *option_lines(config, own)] if own else []
    if grouped:
        lines += ["", "groups (GROUP=CHOICE; the default has a star) and their options:"]
        for group in grouped:
            lines += [*choice_lines(group, groups), *option_lines(config, [group])]
    if several:
        lines += ["", "groups of which several may be chosen (GROUP=CHOICE,CHOICE or GROUP=all):"]
        schema = OmegaConf.get_type(config)
        meanings = docstrings(schema) if is_dataclass(schema) else {}
        for group, chosen in several.items():
            lines += several_lines(group, chosen, meanings.get(group, ""))
    lines += ["", "options of every command:", *option_lines(config, everywhere), ""]
    lines += [
        "Several values (key=a,b) with -m make one run of each combination.",
        "Exit codes: 0 done, 1 failed, 2 wrong use.",
        "",
    ]
    return "\n".join(lines)


def choice_lines(group: str, groups: Groups) -> list[str]:
    """A group with its choices; the one taken by default has a star."""
    marked = [f"{one}*" if one == groups.chosen[group] else one for one in groups.choices[group]]
    return textwrap.wrap(
        f"{group}= {', '.join(marked)}",
        WIDTH,
        initial_indent="  ",
        subsequent_indent="      ",
        break_on_hyphens=False,
    )


def several_lines(group: str, chosen: str, meaning: str) -> list[str]:
    """A group of which an option takes several choices, what it takes by default, what it is."""
    listed = f"{group}= {', '.join(choices_of(group))} (default {chosen})"
    return [
        *textwrap.wrap(
            listed,
            WIDTH,
            initial_indent="  ",
            subsequent_indent="      ",
            break_on_hyphens=False,
        ),
        *textwrap.wrap(meaning, WIDTH, initial_indent="      ", subsequent_indent="      "),
    ]


def option_lines(config: DictConfig, keys: Sequence[str], prefix: str = "") -> Iterator[str]:
    """Each of these options, `key  type = default` and below it its docstring; groups unfolded."""
    schema = OmegaConf.get_type(config)
    meanings = docstrings(schema) if is_dataclass(schema) else {}
    for key in keys:
        node = config._get_node(key)
        dotted = f"{prefix}{key}"
        if isinstance(node, DictConfig) and is_dataclass(OmegaConf.get_type(node)):
            yield from option_lines(node, [str(one) for one in node], f"{dotted}.")
            continue
        kind = spelled(type_of(config, key))
        yield f"  {dotted}  {kind} {shown(config, key)}".rstrip()
        if key in meanings:
            yield from textwrap.wrap(
                meanings[key], WIDTH, initial_indent="      ", subsequent_indent="      "
            )


def shown(config: DictConfig, key: str) -> str:
    """The default of an option, as the user would write it."""
    if OmegaConf.is_missing(config, key):
        return "(required)"
    value: Any = config[key]
    if OmegaConf.is_config(value):
        value = OmegaConf.to_container(value)
    if isinstance(value, bool):
        value = str(value).lower()
    return "" if value is None else f"= {value}"


@cache
def docstrings(schema: type) -> dict[str, str]:
    """The string under each field of a dataclass and of its bases, one line each."""
    found: dict[str, str] = {}
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
                found[field.target.id] = " ".join(text.value.value.split())
    return found
