"""Runs each side in a child process and reads what it answered."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import runtime
from predictors.errors import MoecastError
from runtime.tools.verify.child import USAGE
from runtime.tools.verify.request import Request, dumped

LINES_SHOWN = 5
"""Of what a child wrote before it failed."""


class ChildFailed(RuntimeError):
    """A child process that ended without an answer."""


def run_side(request: Request) -> dict[str, Any]:
    """The child's report; its answers lie in the request's output folder.

    Raises:
        MoecastError: what the child said is the user's to mend.
        ChildFailed: it died.
    """
    request.output.mkdir(parents=True)
    path = request.output / "request.json"
    path.write_text(dumped(request))
    root = str(Path(runtime.__file__).parents[1])
    search = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "runtime.tools.verify.child", str(path)],
        env=os.environ | {"PYTHONPATH": search},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    said = done.stderr.strip().splitlines()
    if done.returncode == USAGE and said:
        raise MoecastError(said[-1])
    if done.returncode != 0:
        how = (
            f"was killed by signal {-done.returncode}" + " (out of memory?)"
            if done.returncode < 0
            else f"ended with exit code {done.returncode}"
        )
        tail = " | ".join(said[-LINES_SHOWN:])
        raise ChildFailed(f"the process of side {request.side.value} {how}: {tail}")
    return json.loads((request.output / "report.json").read_text())
