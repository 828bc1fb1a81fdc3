"""Debian's packages, and clients', each of these in an environment of its own.

The dependencies of clients contradict each other.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.builders.processes import install_packages, run


@pytest.fixture(scope="session")
def debian_program() -> Callable[[str, str], str]:
    """A function that returns the path of a program, which a package of Debian has.

    It installs the package as root, and skips the test otherwise.
    """

    def find(program: str, package: str) -> str:
        places = f"{os.environ['PATH']}:/usr/sbin"
        if (found := shutil.which(program, path=places)) is not None:
            return found
        install = f"apt-get install -y --no-install-recommends {package}"
        if os.geteuid() != 0 or shutil.which("apt-get") is None:
            pytest.skip(f"{program} is missing; as root on Debian: {install}")
        install_packages(install)
        return find(program, package)

    return find


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
            done = run(programs / "pip", "install", "-q", *packages, check=False)
            if done.returncode:
                pytest.skip(f"pip install {' '.join(packages)}: {done.stderr[-300:]}")
            return programs

        yield install
