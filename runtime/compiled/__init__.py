"""The policy core, the transfer loop and the simulator, compiled from their Python files.

`setup.py` compiles modules of `runtime.policy`, `transfer` and `sim` with Cython into this folder.
They have the same names and take precedence over the files that they are made of. Without them,
with `MOECAST_COMPILED=0`, and where a file has changed since it was compiled, the Python files run.
"""

import hashlib
import json
import logging
import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path

log = logging.getLogger(__name__)

VARIABLE = "MOECAST_COMPILED"
"""Environment variable; 0: run the Python files."""
SOURCES = "sources.json"
"""File in this folder with the sha256 of each file that was compiled."""


def extend_path(path: Iterable[str], package: str) -> list[str]:
    """Returns a package's search path, with the folder of its compiled modules first.

    Args:
        path: The package's `__path__`.
        package: Its name: `runtime.policy`.
    """
    folder = Path(__file__).parent.joinpath(*package.split(".")[1:])
    return [*([str(folder)] if is_compiled() else ()), *path]


@cache
def is_compiled() -> bool:
    """Returns whether the compiled modules are used: all of them or none."""
    folder = Path(__file__).parent
    if os.environ.get(VARIABLE) == "0" or not (folder / SOURCES).is_file():
        return False
    changed = find_changed(folder)
    if changed:
        log.warning(
            "%s changed after compilation: the policy core runs uncompiled. To compile it again: "
            "python setup.py build_ext --inplace",
            ", ".join(changed),
        )
    return not changed


def find_changed(folder: Path) -> list[str]:
    """Returns the files that are not those of which the folder's modules were compiled."""
    sources = json.loads((folder / SOURCES).read_text())
    return sorted(
        name for name, digest in sources.items() if hash_source(folder.parent / name) != digest
    )


def hash_source(path: Path) -> str | None:
    """Returns the sha256 of a file, as hex; None if there is no such file."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
