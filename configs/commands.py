"""The commands of every program, for `moecast` and for `python -m PROGRAM`: `commands.yaml`."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from predictors.typed_values import read_table


@dataclass(frozen=True, kw_only=True)
class Command:
    name: str
    """The word after the program's name; empty for a program with one command."""
    config: str
    """`package.module:Class`, the dataclass of its options."""
    run: str
    """`package.module:function`, imported when it runs; takes the typed configuration."""
    summary: str
    """One line of the help text."""
    example: str = ""
    """Arguments of a call that is worth trying first, for the help."""
    basic: tuple[str, ...] = ()
    """Options and groups that `--help` shows, in this order; empty: all of the command's own."""
    check: str | None = None
    """`package.module:function`, called with the typed configuration before `run` is imported: it
    refuses what it can tell without heavy imports, such as a model's folder that is not there."""
    positional: tuple[str, ...] = ()
    """Options that bare arguments set, in this order."""
    resumes: bool = False
    """Whether the same command continues an interrupted run in its run folder or output."""
    needs_run: bool = False
    """Make a run folder when `run_dir` is not set: what the command makes is in there. The others
    write `results.json` only where `run_dir` says so."""


def read_command(name: str, row: Mapping[str, Any]) -> Command:
    lists = {key: tuple(value) for key, value in row.items() if isinstance(value, list)}
    return Command(name=name, **{**row, **lists})


PROGRAMS = {
    program: tuple(read_command(name, row) for name, row in rows.items())
    for program, rows in read_table(Path(__file__).with_suffix(".yaml")).items()
}
"""By the package that `python -m` runs."""
