"""What a run leaves behind: run.json (how it was started) and results.json (what came out)."""

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from predictors.versions import package_versions

RECORDED = ("moecast", "torch", "transformers", "numpy", "onnxruntime", "lightning", "datasets")
"""The packages on whose version a result may depend."""


def default_run_dir(command: str) -> Path:
    """runs/COMMAND/TIME, with a number behind it when two runs start within one second."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    folder = Path("runs", command, stamp)
    number = 1
    while folder.exists():
        number += 1
        folder = Path("runs", command, f"{stamp}-{number}")
    return folder


def describe(command: str, argv: Sequence[str], config: Any, seed: int) -> dict[str, Any]:
    """The record of how a run was started; `config` is the resolved tree of plain values."""
    return {
        "command": command,
        "argv": list(argv),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": seed,
        "git_revision": git_revision(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "versions": package_versions(RECORDED),
        "config": config,
    }


def git_revision() -> str | None:
    """Commit of the checkout that this code runs from, `-dirty` when edited; None outside one."""
    here = Path(__file__).resolve().parent.parent
    if not (here / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=40"],
            capture_output=True, text=True, timeout=10, check=True, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        sys.stderr.write(f"note: the git revision could not be read ({error})\n")
        return None
    return done.stdout.strip()
