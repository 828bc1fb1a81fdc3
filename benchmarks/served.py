"""Runs of `moecast bench`'s own processes, for benchmarks that serve models in turns."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from predictors.errors import MoecastError
from runtime.profiling.bandwidth import drop
from runtime.tools.bench.tasks import ServedRun, ServeTask
from runtime.tools.child_process import ChildFailure, run_in_child


def run_task(function: str, task: Any, scratch: Path) -> dict[str, Any]:
    """Runs `MODULE:FUNCTION` on a task in a separate process.

    Raises:
        MoecastError: the process failed.
    """
    result = run_in_child(function, task, scratch)
    if isinstance(result, ChildFailure):
        raise MoecastError(f"{function.rpartition(':')[2]} failed: {result.reason}")
    return result


def serve_once(task: ServeTask, folders: Iterable[Path], scratch: Path) -> ServedRun:
    """Serves the requests in a separate process, with no file of these in the page cache.

    Raises:
        MoecastError: the process failed.
    """
    for folder in folders:
        for file in folder.iterdir():
            drop(file)
    return ServedRun(**run_task("runtime.tools.bench.serve:run_serve_task", task, scratch))
