"""Writes the same trace again and again, each time killed at a later disk operation.

    python -m tests.builders.killed_writers FOLDER

makes FOLDER/whole without interruption, and FOLDER/0, FOLDER/1, ... of which each writer got a
SIGKILL before its n-th fsync, rename or link; prints how many. One process forks them all:
importing takes a hundred times longer than writing.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from tests.builders.traces import make_spec, make_trace

SPEC = make_spec(num_layers=1)
"""Its traces have few columns."""


def killed_before(operation: int) -> None:
    """SIGKILL for this process, in place of its n-th fsync, rename or link."""
    left = operation

    def counted(real: Callable) -> Callable:
        def wrapped(*args, **kwargs):
            nonlocal left
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
            return real(*args, **kwargs)

        return wrapped

    os.fsync = counted(os.fsync)
    os.link = counted(os.link)
    Path.replace = counted(Path.replace)


def write_in_a_child(folder: Path, *, operation: int | None) -> bool:
    """True when the writer came to its end."""
    child = os.fork()
    if child == 0:
        if operation is not None:
            killed_before(operation)
        make_trace(folder, spec=SPEC, requests_per_unit=3)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return not os.WIFSIGNALED(status)


def main(folder: Path) -> int:
    assert write_in_a_child(folder / "whole", operation=None)
    operation = 0
    while not write_in_a_child(folder / str(operation), operation=operation):
        operation += 1
    return operation


if __name__ == "__main__":
    sys.stdout.write(str(main(Path(sys.argv[1]))))
