"""The work of a child process, done in this one: starting a child takes seconds."""

from importlib import import_module
from pathlib import Path
from typing import Any

from predictors.errors import MoecastError
from runtime.tools.child_process import ChildFailure


def run_here(function: str, task: Any, _folder: Path, *, limit_seconds: float = 0.0) -> Any:
    """Stands for `run_in_child` where neither memory nor a kill matters."""
    module, name = function.split(":")
    try:
        return getattr(import_module(module), name)(task)
    except MoecastError as error:
        return ChildFailure(str(error), is_user_error=True)
