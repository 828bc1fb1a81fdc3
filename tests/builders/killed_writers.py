"""Writes the same trace again and again, each time killed at a later disk operation.

    python -m tests.builders.killed_writers FOLDER

makes FOLDER/whole without interruption, and FOLDER/0, FOLDER/1, ... of which each writer got a
SIGKILL before its n-th fsync, rename or link; prints how many. One process forks them all:
importing takes a hundred times longer than writing.
"""

import os
import signal
import sys
from pathlib import Path

from tests.builders.killing import in_a_child, kill_before
from tests.builders.traces import make_spec, make_trace

SPEC = make_spec(num_layers=1)
"""Its traces have few columns."""


def write_in_a_child(folder: Path, *, operation: int | None) -> bool:
    """True when the writer came to its end."""

    def write() -> None:
        os.fsync = lambda _: None  # a kill is no power failure: what was written is there
        if operation is not None:
            kill_before(operation, (os, "fsync"), (os, "link"), (Path, "replace"))
        make_trace(folder, spec=SPEC, requests_per_unit=3)

    code = in_a_child(write)
    assert code in (0, -signal.SIGKILL)
    return code == 0


def main(folder: Path) -> int:
    assert write_in_a_child(folder / "whole", operation=None)
    operation = 0
    while not write_in_a_child(folder / str(operation), operation=operation):
        operation += 1
    return operation


if __name__ == "__main__":
    sys.stdout.write(str(main(Path(sys.argv[1]))))
