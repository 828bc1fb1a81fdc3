"""Runs programs in other processes."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def run(
    *command: object, folder=ROOT, environment: Mapping | None = None, timeout=400.0, check=True
) -> subprocess.CompletedProcess[str]:
    """Runs a program to its end; what it says fails the test unless it succeeds.

    Args:
        environment: None is this process's own.
        check: False leaves it to the caller whether it has to succeed.
    """
    done = subprocess.run(
        list(map(str, command)), cwd=folder, env=environment, timeout=timeout, check=False,
        stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip
    assert not check or done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done


def run_python(
    *arguments: object, environment: Mapping[str, str] | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Runs Python; `environment` is in addition to this process's own, `options` are of `run`."""
    merged = {**os.environ, **(environment or {})}
    return run(sys.executable, *arguments, environment=merged, **options)


def install_packages(command: str) -> None:
    """Runs a command of Debian's that installs packages, as root, once it knows the latest."""
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for one in ("apt-get update", command):
        options = {"env": environment, "timeout": 240, "capture_output": True}
        subprocess.run(one.split(), check=True, **options)


def write_moecast(folder: Path) -> Path:
    """Writes a program `moecast` into the folder, which runs this project; returns its path."""
    folder.mkdir(exist_ok=True)
    program = folder / "moecast"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m moecast "$@"\n')
    program.chmod(0o755)
    return program
