"""Writes the reference of all commands and options from their schemas."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from configs.command import Command
from configs.commands import PROGRAMS
from configs.compose import compose_defaults
from configs.help import default_text, describe_type, field_docstrings
from configs.schema import option_type
from moecast.command import COMMANDS
from predictors.config import SEVERAL, RunConfig

EVERYWHERE = [field.name for field in fields(RunConfig)]
HEAD = ["| option | default | meaning |", "|---|---|---|"]

OptionGroups = dict[str, tuple[DictConfig, list[str]]]
"""By the name under which a group is described: its options and its choices."""


def render_commands() -> str:
    """Returns the sections of all commands, of the groups that they share, and of all programs."""
    groups: OptionGroups = {}
    lines: list[str] = []
    for heading, rows in COMMANDS.items():
        lines += [f"## {heading}", ""]
        for name, (program, _) in rows.items():
            commands = PROGRAMS[program]
            if program == "runtime":
                commands = tuple(command for command in commands if command.name == name)
            for command in commands:
                called = name if program == "runtime" else f"{name} {command.name}".strip()
                lines += render_command(f"moecast {called}", command, groups)
    lines += ["## Groups of options", ""]
    lines += [
        "A group is chosen by name (`model=olmoe`), and each of its options can be set on its own "
        "(`model.dtype=bfloat16`).",
        "",
    ]
    for group in sorted(groups):
        config, choices = groups[group]
        lines += [f"### {group}", ""]
        if choices:
            lines += [f"Choices: {', '.join(f'`{choice}`' for choice in choices)}.", ""]
        lines += [*HEAD, *option_rows(config, [str(key) for key in config], f"{group}."), ""]
    config, _ = compose_defaults("generate")
    lines += ["## Options of every command", "", *HEAD, *option_rows(config, EVERYWHERE)]
    return "\n".join(lines) + "\n"


def render_command(called: str, command: Command, groups: OptionGroups) -> Iterator[str]:
    """Yields a command's section; adds the groups that it uses to `groups`."""
    config, chosen = compose_defaults(command.config)
    schema = OmegaConf.get_type(config)
    several = {field.name for field in fields(schema) if SEVERAL in field.metadata}
    used, own = [], []
    for key in map(str, config):
        node = config._get_node(key)
        if isinstance(node, DictConfig) and is_dataclass(OmegaConf.get_type(node)):
            described = chosen.hydra_names.get(key, key).partition("@")[0]
            groups.setdefault(described, (node, chosen.choices.get(key, [])))
            link = f"[`{key}`](#{described})"
            default = f" (`{chosen.chosen[key]}`)" if key in chosen.chosen else ""
            used.append(link + default)
        elif key in several:
            used.append(f"[`{key}`](#{key}), several or `all`")
        elif key not in EVERYWHERE:
            own.append(key)
    yield from (f"### {called}", "", command.summary, "")
    # A command's own options come before those that it shares with others.
    own.sort(key=lambda key: key not in schema.__annotations__)
    if own:
        yield from (*HEAD, *option_rows(config, own), "")
    if used:
        yield from (f"Groups, with their defaults: {', '.join(used)}.", "")


def option_rows(config: DictConfig, keys: list[str], prefix: str = "") -> Iterator[str]:
    """Yields a row for each option: its name and type, default and meaning."""
    meanings = field_docstrings(OmegaConf.get_type(config))
    for key in keys:
        node = config._get_node(key)
        if isinstance(node, DictConfig) and is_dataclass(OmegaConf.get_type(node)):
            yield from option_rows(node, [str(name) for name in node], f"{prefix}{key}.")
            continue
        default = default_text(config, key).removeprefix("= ")
        shown = f"`{default}`" if default and default != "(required)" else default.strip("()")
        kind = describe_type(key, option_type(config, key))
        cells = (f"`{prefix}{key}` {kind}", shown, meanings.get(key, ""))
        yield f"| {' | '.join(escape(cell) for cell in cells)} |"


def escape(cell: Any) -> str:
    return str(cell).replace("|", "\\|").replace("<", "&lt;")
