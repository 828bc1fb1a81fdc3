"""Clients' packages, each in an environment of its own: their dependencies contradict others."""

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def client_programs() -> Iterator[Callable[..., Path]]:
    """Yields a function that installs packages and returns the folder of their programs.

    It skips the test where they cannot be installed.
    """
    with tempfile.TemporaryDirectory(prefix="clients-") as folder:

        @cache
        def install(*packages: str) -> Path:
            programs = Path(folder) / packages[0] / "bin"
            subprocess.run([sys.executable, "-m", "venv", programs.parent], check=True, timeout=120)
            done = subprocess.run(
                [programs / "pip", "install", "-q", *packages],
                capture_output=True,
                text=True,
                timeout=400,
            )
            if done.returncode:
                pytest.skip(f"pip install {' '.join(packages)}: {done.stderr[-300:]}")
            return programs

        yield install
