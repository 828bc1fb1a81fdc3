"""The work of a child process, done in this one: starting a child takes seconds."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any


def run_here(function: str, task: Any, _folder: Path) -> Any:
    """Stands for `run_in_child` where neither memory nor a failure matters."""
    module, name = function.split(":")
    return getattr(import_module(module), name)(task)


def run_in_folder(function: str, task: Any, folder: Path, **_: Any) -> Any:
    """The same with a folder for the child's files, and results that passed through JSON."""
    folder.mkdir(parents=True)
    return json.loads(json.dumps(run_here(function, task, folder)))
