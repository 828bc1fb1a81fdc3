"""Counts that are committed, and taken by a process in which the policy core runs uncompiled."""

import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from runtime.compiled import VARIABLE
from tests.builders.cheap_loads import cheap
from tests.builders.processes import run_python

Counts = Mapping[str, float]


@dataclass(frozen=True)
class CommittedCounts:
    """Counts of several cells; `python -m MODULE` writes them, with `--print` to stdout only."""

    module: str
    file: Path
    count: Callable[[Path], Mapping[str, Counts]]
    """Is called with a scratch folder."""

    def main(self) -> None:
        if os.environ.get(VARIABLE) != "0":
            # Calls of compiled functions are not reported: the Python files are counted, and a core
            # that is out of date must not leave other compiled code in use.
            command = [sys.executable, "-m", self.module, *sys.argv[1:]]
            # Threads as in tests, which compare with what is written here.
            own = {VARIABLE: "0", "OMP_NUM_THREADS": "1"}
            os.execve(sys.executable, command, {**os.environ, **own})
        with tempfile.TemporaryDirectory() as scratch, cheap():
            text = json.dumps(self.count(Path(scratch)), indent=1)
        if "--print" in sys.argv:
            sys.stdout.write(text)
        else:
            self.file.write_text(text + "\n")

    @cached_property
    def now(self) -> Mapping[str, Counts]:
        """Counts in another process: in this one, the policy core may be compiled."""
        return json.loads(run_python("-m", self.module, "--print", timeout=300).stdout)

    @cached_property
    def committed(self) -> Mapping[str, Counts]:
        return json.loads(self.file.read_text())
