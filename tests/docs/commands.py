"""Writes the reference of all commands and options from the dataclasses that declare them."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from itertools import combinations
from typing import Any

from configs.commands import PROGRAMS, Command
from configs.compose import compose_defaults, find_groups, takes_several
from configs.execution import import_named
from configs.help import EVERYWHERE, REQUIRED, WORDS, default_text, describe_type, find_meaning
from moecast.command import COMMANDS
from predictors import typed_values as typed
from predictors.config import RunConfig
from runtime.presets import choice_names


@dataclass(kw_only=True)
class CommandOptions:
    called: str
    command: Command
    own: dict[str, str] = field(default_factory=dict)
    """Name of each option to its row."""
    groups: list[str] = field(default_factory=list)
    """Each group with its default."""
    same_as: str = ""
    """The command before that has the same options."""


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
    commands = [one for several in sections.values() for one in several]
    find_equal(commands)
    shared = find_shared(commands)
    lines: list[str] = []
    for heading, several in sections.items():
        lines += [f"## {heading}", ""]
        for one in several:
            lines += render_command(one, shared)
    lines += ["## Shared options", "", *sorted(shared.values()), "", "## Groups of options", ""]
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
        defaults = typed.default_values(schema)
        lines += [option_row(schema, defaults, key, name) for key in typed.option_keys(schema)]
        lines += [""]
    defaults = typed.default_values(RunConfig)
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
    for key, declared in typed.field_types(schema).items():
        if key in groups and takes_several(schema, key):
            options.groups.append(f"[`{key}`](#{groups[key].folder}), several or `all`")
        elif typed.is_schema(declared):
            name = groups[key].folder if key in groups else key
            described.setdefault(name, declared)
            default = f" (`{groups[key].default}`)" if key in groups else ""
            options.groups.append(f"[`{key}`](#{name}){default}")
        elif key not in EVERYWHERE:
            options.own[key] = option_row(schema, defaults, key)
    return options


def find_equal(commands: Iterable[CommandOptions]) -> None:
    """Notes which commands have all options of one before them."""
    for before, one in combinations(commands, 2):
        is_equal = (before.own, before.groups) == (one.own, one.groups)
        if is_equal and len(one.own) > 1 and not before.same_as:
            one.same_as = before.called


def find_shared(commands: Iterable[CommandOptions]) -> dict[str, str]:
    """Returns the row of each option that several commands have, of one name the most frequent."""
    different = (one for one in commands if not one.same_as)
    counts = Counter(option for one in different for option in one.own.items())
    # The most frequent ones last, as they replace others of the name.
    return {name: row for (name, row), count in reversed(counts.most_common()) if count > 1}


def render_command(options: CommandOptions, shared: dict[str, str]) -> Iterator[str]:
    yield from (f"### {options.called}", "", options.command.summary, "")
    if options.same_as:
        anchor = options.same_as.replace(" ", "-")
        yield from (f"Its options are those of [`{options.same_as}`](#{anchor}).", "")
        return
    if own := [row for name, row in options.own.items() if shared.get(name) != row]:
        yield from (*own, "")
    if others := [f"`{name}`" for name, row in options.own.items() if shared.get(name) == row]:
        yield from (f"[Shared](#shared-options): {', '.join(others)}.", "")
    if options.groups:
        yield from (f"Groups: {', '.join(options.groups)}.", "")


def option_row(schema: type, defaults: dict[str, Any], key: str, prefix: str = "") -> str:
    """Returns the line of an option: its name, default, type where that is not evident, meaning."""
    default = default_text(defaults, key)
    required = default == REQUIRED
    name, meaning = f"{prefix}.{key}".lstrip("."), find_meaning(schema, key)
    declared = typed.option_type(schema, key)
    kind = describe_type(key.rpartition(".")[2], declared)
    if re.fullmatch(r"\d+ texts", default):
        kind = default
    elif default and not required:
        name += f'="{default}"' if " " in default else f"={default}"
    if is_evident(kind, declared, meaning, has_default="=" in name):
        kind = ""
    about = ", ".join(filter(None, (kind, "required" * required)))
    return f"* `{name}`{f' ({about})' * bool(about)}: {meaning}".replace("<", "&lt;")


def is_evident(kind: str, declared: Any, meaning: str, *, has_default: bool) -> bool:
    """Says whether the default tells an option's type, or the meaning names all of its choices."""
    types = (one for one in typed.union_members(declared) if isinstance(one, type))
    choices = [str(member.value) for one in types if issubclass(one, Enum) for member in one]
    if choices:
        return all(re.search(rf"\b{re.escape(choice)}\b", meaning) for choice in choices)
    return has_default and kind in WORDS.values()
