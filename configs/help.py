"""Writes `--help` from the schemas, their docstrings and the groups' files, without torch."""

import ast
import inspect
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

from omegaconf import DictConfig, OmegaConf

from configs.choices import group_choices, multi_choice_defaults
from configs.command import Command
from configs.compose import compose_defaults
from configs.schema import option_type, type_text
from predictors.config import RunConfig

WIDTH = 100
INDENT = " " * 6


def write_program_help(called: str, commands: Sequence[Command]) -> str:
    placeholder = "[COMMAND]" if any(not command.name for command in commands) else "COMMAND"
    lines = [f"usage: {called} {placeholder} [key=value ...]", ""]
    width = max(len(command.name) for command in commands)
    lines += [
        f"  {command.name or '(none)':{max(width, 6)}}  {command.summary}" for command in commands
    ]
    lines += ["", f"{called} COMMAND --help lists a command's options.", ""]
    if any(not command.name for command in commands):
        alone = next(command for command in commands if not command.name)
        return "\n".join(lines) + "\n" + write_command_help(called, alone)
    return "\n".join(lines)


def write_command_help(called: str, command: Command) -> str:
    """Writes usage, options with type, default and meaning, and the groups' choices."""
    config, groups = compose_defaults(command.config)
    first = "".join(f" [{name.upper()}]" for name in command.positional)
    usage = " ".join(filter(None, (called, command.name)))
    lines = [f"usage: {usage}{first} [key=value ...]", "", *textwrap.wrap(command.summary, WIDTH)]
    everywhere = [field.name for field in fields(RunConfig)]
    grouped = [key for key in map(str, config) if key in groups.chosen]
    several = multi_choice_defaults(command.config)
    own = [key for key in map(str, config) if key not in (*everywhere, *grouped, *several)]
    lines += ["", "options (key=value):", *format_options(config, own)] if own else []
    if grouped:
        lines += ["", "groups (GROUP=CHOICE; the default has a star) and their options:"]
        for group in grouped:
            default = groups.chosen[group]
            marked = [f"{name}*" if name == default else name for name in groups.choices[group]]
            lines += wrap_choices(f"{group}= {', '.join(marked)}")
            lines += format_options(config, [group])
    if several:
        lines += ["", "groups of which several may be chosen (GROUP=CHOICE,CHOICE or GROUP=all):"]
        schema = OmegaConf.get_type(config)
        meanings = field_docstrings(schema) if is_dataclass(schema) else {}
        for group, chosen in several.items():
            lines += wrap_choices(f"{group}= {', '.join(group_choices(group))} (default {chosen})")
            lines += wrap_meaning(meanings.get(group, ""))
    lines += ["", "options of every command:", *format_options(config, everywhere), ""]
    lines += [
        "With -m, several values (key=a,b) make one run of each combination.",
        "Exit codes: 0 done, 1 failed, 2 wrong use.",
        "",
    ]
    return "\n".join(lines)


def wrap_choices(text: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent="  ", subsequent_indent=INDENT, break_on_hyphens=False
    )


def wrap_meaning(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT)


def format_options(config: DictConfig, keys: Sequence[str], prefix: str = "") -> Iterator[str]:
    """Yields `key  type = default` and the docstring of each option; nested ones are unfolded."""
    schema = OmegaConf.get_type(config)
    meanings = field_docstrings(schema) if is_dataclass(schema) else {}
    for key in keys:
        node = config._get_node(key)
        dotted = f"{prefix}{key}"
        if isinstance(node, DictConfig) and is_dataclass(OmegaConf.get_type(node)):
            yield from format_options(node, [str(name) for name in node], f"{dotted}.")
            continue
        kind = type_text(option_type(config, key))
        yield f"  {dotted}  {kind} {default_text(config, key)}".rstrip()
        if key in meanings:
            yield from wrap_meaning(meanings[key])


def default_text(config: DictConfig, key: str) -> str:
    """Returns the default of an option as the user would write it."""
    if OmegaConf.is_missing(config, key):
        return "(required)"
    value: Any = config[key]
    if OmegaConf.is_config(value):
        value = OmegaConf.to_container(value)
    if isinstance(value, bool):
        value = str(value).lower()
    return "" if value is None else f"= {value}"


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
