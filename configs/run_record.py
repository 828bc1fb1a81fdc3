"""The record of a run: run.json with arguments, configuration and versions."""

import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from predictors.origin import RESULT_PACKAGES, name_machine, package_versions, read_git_revision


def default_run_dir(command: str) -> Path:
    """Returns runs/COMMAND/TIME, numbered if two runs start within one second."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    folder = Path("runs", command, stamp)
    number = 1
    while folder.exists():
        number += 1
        folder = Path("runs", command, f"{stamp}-{number}")
    return folder


def describe_run(
    command: str, argv: Sequence[str], files: Sequence[Path], config: Any
) -> dict[str, Any]:
    """Returns the content of run.json; `config` is the resolved tree of plain values."""
    return {
        "command": command,
        "argv": list(argv),
        "config_files": list(map(str, files)),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": config["seed"],
        "git_revision": read_git_revision(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "machine": name_machine(),
        "versions": package_versions(RESULT_PACKAGES),
        "config": config,
    }
