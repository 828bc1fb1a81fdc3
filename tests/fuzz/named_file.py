"""A file with the input, for parsers that take a path."""

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path


@cache
def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="moecast-fuzz-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def write_input(data: bytes, name: str = "input") -> Path:
    """Writes the input to the file NAME of a temporary folder, which stays until the end."""
    path = _folder() / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    return path
