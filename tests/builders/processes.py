"""Runs Python in other processes."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_python(
    *arguments: object,
    folder: Path = ROOT,
    environment: Mapping[str, str] | None = None,
    timeout: float = 400.0,
) -> subprocess.CompletedProcess[str]:
    """Runs Python with these arguments to its end; what it says fails the test unless it succeeds.

    Args:
        environment: In addition to this process's own.
    """
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=folder,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done
