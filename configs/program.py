"""Starts a program, whatever files lie in the current folder."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""Folder that contains our packages: `site-packages`, or a checkout."""


def run_program(name: str, argv: Sequence[str] | None = None, *, called: str | None = None) -> int:
    """Runs a command of a program; returns the exit code.

    Args:
        name: key of `PROGRAMS`.
        argv: arguments; default: those of the process.
        called: the words before them, as the user typed them; default: `python -m NAME`.
    """
    try:
        from configs.cli import main
        from configs.commands import PROGRAMS
    except KeyboardInterrupt:
        sys.stderr.write("interrupted before it began; run the same command again\n")
        return 130
    return main(name, PROGRAMS[name], argv, called=called)


def hide_current_folder() -> None:
    """Stops imports from the current folder, where a user's `train.py` would replace ours.

    `python -m` and an empty entry in PYTHONPATH put that folder on the search path. PYTHONSAFEPATH
    does the same for the Python processes that this one starts. A checkout may be the current
    folder.
    """
    # `__main__` puts our folder first, to import this. Of site-packages, it must not stay there.
    if str(ROOT) in sys.path[1:]:
        sys.path.remove(str(ROOT))
    here = Path.cwd()
    if here == ROOT:
        return
    sys.path[:] = [entry for entry in sys.path if Path(entry).absolute() != here]
    os.environ["PYTHONSAFEPATH"] = "1"
