"""Forks a process for each scenario, so that none waits for the imports and none outlives its time.

    python -m tests.builders.faults.host FOLDER

Reads `{"scenario": name, "arguments": {...}, "seconds": limit}` lines, answers each with
`{"exit": code or -signal, "result": what the scenario printed or null, "stderr": its end}`.
"""

import faulthandler
import gc
import json
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

from tests.builders.faults import packing, results, scenarios
from tests.builders.faults.bench import Bench, make_bench

GRACE_SECONDS = 3.0
"""After a scenario's limit, in which its stacks are written, before it is killed."""


def child(bench: Bench, request: dict[str, Any], *, write: int, stderr: Path) -> None:
    """The forked process; never returns."""
    handle = os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 1)  # whatever commands print is no answer
    os.dup2(handle, 2)
    # A shell starts what runs in its background with interrupts ignored, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.enable(file=2)
    faulthandler.dump_traceback_later(request["seconds"], exit=True, file=2)
    code = 1
    try:
        name = request["scenario"]
        owner = next(one for one in (packing, results, scenarios) if hasattr(one, name))
        scenario = getattr(owner, name)
        result = scenario(bench, **request["arguments"])
        os.write(write, json.dumps(result).encode() + b"\n")
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
    finally:
        os._exit(code)


def run(bench: Bench, request: dict[str, Any]) -> dict[str, Any]:
    """Forks, waits, kills."""
    stderr = bench.folder / "stderr.log"
    read, write = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(read)
        child(bench, request, write=write, stderr=stderr)
    os.close(write)
    deadline = time.monotonic() + request["seconds"] + GRACE_SECONDS
    output = b""
    while (left := deadline - time.monotonic()) > 0:
        if select.select([read], [], [], left)[0]:
            chunk = os.read(read, 65536)
            output += chunk
            if not chunk:
                break
    else:
        os.kill(process, signal.SIGKILL)
    os.close(read)
    _, status = os.waitpid(process, 0)
    lines = output.decode().splitlines()
    return {
        "exit": os.waitstatus_to_exitcode(status),
        "result": json.loads(lines[-1]) if lines else None,
        "stderr": stderr.read_text(errors="replace")[-6000:],
    }


def main(folder: Path) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints is no answer
    bench = make_bench(folder)
    gc.freeze()  # a collection in a fork would copy all of this memory
    answers.write("ready\n")
    for line in sys.stdin:
        answers.write(json.dumps(run(bench, json.loads(line))) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
