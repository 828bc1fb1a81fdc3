"""The description of a command, as a program's `__main__` declares it."""

from dataclasses import dataclass


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
    keeps_run: bool = True
    """Make a run folder when `run_dir` is not set; off for commands that only read."""
    records: bool = True
    """Write run.json and results.json; off for commands that read another command's run."""
