"""Run one function in a child process and return its result.

Memory, page faults and threads that a child measures are then its own. A fork server that has
imported PyTorch and Transformers starts the children: importing these takes several seconds,
loading a model without its experts one.
"""

import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.machinery import PathFinder
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from predictors.errors import MoecastError

ROOT = Path(__file__).resolve().parents[2]
STDERR = 2
PRELOADED = ["runtime.engine.loading"]
"""Imports that every child needs. Libraries of learned predictors are imported by the children
that use one, so that they do not add to the memory of the others."""


@dataclass(frozen=True)
class ChildFailure:
    """The reason why a child returned no result."""

    reason: str
    is_user_error: bool = False
    """True for a `MoecastError`, whose message tells the user what to change."""


def run_in_child(
    function: str, task: Any, folder: Path, *, limit_seconds: float | None = None
) -> Any:
    """Call `function(task)` in a child process.

    Args:
        function: "module:name"; its result must be plain JSON values.
        task: a picklable argument.
        folder: a new folder for the child's files.
        limit_seconds: a child that takes longer is killed.

    Returns:
        The function's result, or a `ChildFailure`.
    """
    folder.mkdir(parents=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process: ForkServerProcess = context.Process(target=_child, args=(function, task, folder))
    with own_folder_first():
        process.start()
    try:
        process.join(limit_seconds)
        if process.is_alive():
            return ChildFailure(f"took more than {limit_seconds:.0f} s and was ended")
    finally:
        process.kill()
        process.join()
    if process.exitcode == 0:
        answer = json.loads((folder / "answer.json").read_text())
        if "user_error" in answer:
            return ChildFailure(answer["user_error"], is_user_error=True)
        return answer["result"]
    stderr = folder / "stderr"
    return ChildFailure(
        describe_exit(process.exitcode or 0, stderr.read_text() if stderr.exists() else "")
    )


@contextmanager
def own_folder_first() -> Iterator[None]:
    """Makes children import this package, though a script's folder has a `runtime.py`.

    A child searches the parent's path; the fork server, which Python starts with the first child,
    searches the current folder unless PYTHONSAFEPATH is set.
    """
    spec = PathFinder.find_spec("runtime")
    if spec is None or str(spec.origin).startswith(f"{ROOT}/"):
        yield
        return
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    sys.path.insert(0, str(ROOT))
    try:
        yield
    finally:
        sys.path.remove(str(ROOT))
        if before is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = before


def describe_exit(exit_code: int, stderr: str) -> str:
    """Describe in one line the error that ended a child, or how it ended."""
    if exit_code < 0:
        hint = " (out of memory?)" if exit_code == -signal.SIGKILL else ""
        return f"the process was killed by signal {-exit_code}{hint}"
    lines = [line for line in stderr.splitlines() if line.strip()]
    return lines[-1] if lines else f"the process ended with exit code {exit_code}"


def _child(function: str, task: Any, folder: Path) -> None:
    """Run in the child; its stderr, a traceback included, goes to a file."""
    with (folder / "stderr").open("w") as file:
        os.dup2(file.fileno(), STDERR)
    module, name = function.split(":")
    answer: dict[str, Any]
    try:
        answer = {"result": getattr(import_module(module), name)(task)}
    except MoecastError as error:
        answer = {"user_error": " ".join(str(error).split())}
    (folder / "answer.json").write_text(json.dumps(answer))
