"""One file for all benchmarks of the server, each a part of its own."""

import json
import os
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.machine import machine

OUTPUT = "benchmarks/results/serving.json"


def here() -> dict[str, Any]:
    """The machine, before a benchmark begins."""
    return machine(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))


def keep(
    part: str, found: dict[str, Any], arguments: dict[str, str], described: dict[str, Any]
) -> None:
    """Writes what was found, with the machine and the command, and prints it.

    Other parts of the file stay as they are. `output=FILE` names another file.
    """
    path = Path(arguments.get("output", OUTPUT))
    every = json.loads(path.read_text()) if path.is_file() else {}
    command = ["python -m benchmarks.serving." + part]
    command += [f"{key}={value}" for key, value in arguments.items() if key != "output"]
    every[part] = {
        "command": " ".join(command),
        "machine": described,
        **found,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(dict(sorted(every.items())), indent=1) + "\n")
    temporary.replace(path)
    Console(highlight=False, soft_wrap=True).print_json(json.dumps({part: found}))
