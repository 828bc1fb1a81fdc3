"""The policy core and the simulator as extension modules, compiled from their Python files.

`setup.py` compiles modules of `runtime.policy` and `runtime.sim` with Cython into this folder. They
have the same names and take precedence over the files that they are made of. Without them, with
`MOECAST_COMPILED=0`, and where a file has changed since it was compiled, the Python files run.
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
    own = Path(__file__).parent
    if os.environ.get(VARIABLE) == "0" or not (own / SOURCES).is_file():
        return False
    sources = json.loads((own / SOURCES).read_text())
    changed = sorted(name for name, digest in sources.items() if hash_source(name) != digest)
    if changed:
        log.warning(
            "%s changed after compilation: the policy core runs uncompiled. To compile it again: "
            "python setup.py build_ext --inplace",
            ", ".join(changed),
        )
    return not changed


def hash_source(name: str) -> str | None:
    """Returns the sha256 of a file of `runtime`, as hex; None if there is no such file."""
    path = Path(__file__).parents[1] / name
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
