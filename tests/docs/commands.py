"""Writes the reference of all commands and options from the dataclasses that declare them."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from configs.commands import PROGRAMS, Command
from configs.compose import compose_defaults, find_groups, takes_several
from configs.execution import import_named
from configs.help import EVERYWHERE, REQUIRED, default_text, describe_type, find_meaning
from moecast.command import COMMANDS
from predictors.config import RunConfig
from predictors.typed_values import default_values, field_types, is_schema, option_keys, option_type
from runtime.presets import choice_names


@dataclass(kw_only=True)
class CommandOptions:
    called: str
    command: Command
    own: dict[str, str] = field(default_factory=dict)
    """Name of each option to its row."""
    groups: list[str] = field(default_factory=list)
    """Each group with its default."""


def render_commands() -> str:
    """Returns the sections of all commands, of what they share, and of all programs.

    An option that is the same for several commands is described once.
    """
    described: dict[str, type] = {}
    sections = {
        heading: [
            read_options(f"moecast {called}", command, described)
            for name, (program, _) in rows.items()
            for called, command in named_commands(name, program)
        ]
        for heading, rows in COMMANDS.items()
    }
    counts = Counter(
        row for commands in sections.values() for one in commands for row in one.own.values()
    )
    lines: list[str] = []
    for heading, commands in sections.items():
        lines += [f"## {heading}", ""]
        for one in commands:
            lines += render_command(one, counts)
    shared = {
        row: name
        for commands in sections.values()
        for one in commands
        for name, row in one.own.items()
        if counts[row] > 1
    }
    lines += ["## Shared options", "", *sorted(shared), ""]
    lines += ["## Groups of options", ""]
    lines += [
        "A group is chosen by name (`model=olmoe`), and each of its options can be set on its own "
        "(`model.dtype=bfloat16`).",
        "",
    ]
    for name in sorted(described):
        lines += [f"### {name}", ""]
        if choices := choice_names(name):
            lines += [f"Choices: {', '.join(f'`{choice}`' for choice in choices)}.", ""]
        schema = described[name]
        defaults = default_values(schema)
        lines += [option_row(schema, defaults, key, name) for key in option_keys(schema)]
        lines += [""]
    defaults = default_values(RunConfig)
    rows = [option_row(RunConfig, defaults, key) for key in EVERYWHERE]
    return "\n".join([*lines, "## Options of every command", "", *rows]) + "\n"


def named_commands(name: str, program: str) -> Iterator[tuple[str, Command]]:
    """Yields the commands of a program with their names after `moecast`."""
    for command in PROGRAMS[program]:
        if program != "runtime":
            yield f"{name} {command.name}".strip(), command
        elif command.name == name:
            yield name, command


def read_options(called: str, command: Command, described: dict[str, type]) -> CommandOptions:
    """Returns a command's options; adds the groups that it uses to `described`."""
    schema = import_named(command.config)
    defaults, groups = compose_defaults(schema), find_groups(schema)
    options = CommandOptions(called=called, command=command)
    for key, declared in field_types(schema).items():
        if key in groups and takes_several(schema, key):
            options.groups.append(f"[`{key}`](#{groups[key].folder}), several or `all`")
        elif is_schema(declared):
            name = groups[key].folder if key in groups else key
            described.setdefault(name, declared)
            default = f" (`{groups[key].default}`)" if key in groups else ""
            options.groups.append(f"[`{key}`](#{name}){default}")
        elif key not in EVERYWHERE:
            options.own[key] = option_row(schema, defaults, key)
    return options


def render_command(options: CommandOptions, counts: Counter[str]) -> Iterator[str]:
    yield from (f"### {options.called}", "", options.command.summary, "")
    if own := [row for row in options.own.values() if counts[row] == 1]:
        yield from (*own, "")
    if shared := [f"`{name}`" for name, row in options.own.items() if counts[row] > 1]:
        yield from (f"[Shared](#shared-options): {', '.join(shared)}.", "")
    if options.groups:
        yield from (f"Groups: {', '.join(options.groups)}.", "")


def option_row(schema: type, defaults: dict[str, Any], key: str, prefix: str = "") -> str:
    """Returns the line of an option: its name, type, default and meaning."""
    default = default_text(defaults, key)
    shown = f" = `{default}`" if default and default != REQUIRED else f" {default}".rstrip()
    kind = describe_type(key.rpartition(".")[2], option_type(schema, key))
    name, meaning = f"{prefix}.{key}".lstrip("."), find_meaning(schema, key)
    return f"* `{name}` {kind}{shown}{': ' * bool(meaning)}{meaning}".replace("<", "&lt;")
