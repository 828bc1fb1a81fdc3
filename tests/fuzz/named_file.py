"""A file with the input, for parsers that take a path."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory


@cache
def _folder() -> TemporaryDirectory:
    return TemporaryDirectory(prefix="moecast-fuzz-", ignore_cleanup_errors=True)


def write_input(data: bytes, name: str = "input") -> Path:
    """Writes the input to the file NAME of a temporary folder, which stays until the end."""
    path = Path(_folder().name, name)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    return path
