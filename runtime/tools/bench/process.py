"""Runs each task in a process of its own, which has imported everything and done nothing yet.

An arm's memory, page faults and threads are then its own and nobody else's. A server that has the
imports forks the children: importing PyTorch and Transformers takes several seconds, loading a
model without its experts one.
"""

import json
import multiprocessing
import os
import signal
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from predictors.errors import MoecastError
from runtime.tools.bench.tasks import Failure, Task

LIMIT_SECONDS = 900.0
"""What takes longer has hung: its row says so, and the others go on."""
STDERR = 2
PRELOADED = ["runtime.tools.bench.child"]
"""What every arm needs. A learned predictor's libraries are imported by the arms that have one: the
others' memory is not to pay for them."""


def answer(task: Task, folder: Path, *, limit_seconds: float = LIMIT_SECONDS) -> Any:
    """What the child found, or a `Failure` with its cause.

    Args:
        folder: a new one, for what the child writes.
    """
    folder.mkdir(parents=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process: ForkServerProcess = context.Process(target=child, args=(task, folder))
    process.start()
    try:
        process.join(limit_seconds)
        if process.is_alive():
            return Failure(f"took more than {limit_seconds:.0f} s and was ended")
    finally:
        process.kill()
        process.join()
    if process.exitcode == 0:
        found = json.loads((folder / "answer.json").read_text())
        return Failure(found["refused"]) if "refused" in found else found["found"]
    return Failure(cause(process.exitcode or 0, (folder / "stderr").read_text()))


def cause(exit_code: int, said: str) -> str:
    """One line: the error that ended the child, or how it ended."""
    if exit_code < 0:
        hint = " (out of memory?)" if exit_code == -signal.SIGKILL else ""
        return f"the process was killed by signal {-exit_code}{hint}"
    lines = [line for line in said.splitlines() if line.strip()]
    return lines[-1] if lines else f"the process ended with exit code {exit_code}"


def child(task: Task, folder: Path) -> None:
    """In the child. What it says on stderr, its traceback too, goes to a file."""
    with (folder / "stderr").open("w") as file:
        os.dup2(file.fileno(), STDERR)
    from runtime.tools.bench.child import respond

    found: dict[str, Any]
    try:
        found = {"found": respond(task)}
    except MoecastError as error:
        found = {"refused": " ".join(str(error).split())}
    (folder / "answer.json").write_text(json.dumps(found))
