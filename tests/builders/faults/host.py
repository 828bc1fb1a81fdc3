"""Forks a process for each scenario, so that none waits for the imports and none outlives its time.

Receives `{"scenario": name, "arguments": {...}, "seconds": limit}`, answers each with
`{"exit": code or -signal, "result": what the scenario returned or null, "stderr": its end}`.
"""

import faulthandler
import gc
import json
import os
import signal
import sys
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from tests.builders.faults import packing, results, scenarios
from tests.builders.faults.bench import Bench, make_bench

GRACE_SECONDS = 3.0
"""After a scenario's limit, in which its stacks are written, before it is killed."""


def child(bench: Bench, request: dict[str, Any], answer: Path, stderr: Path) -> None:
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
        owners = (packing, results, scenarios)
        scenario = next(getattr(one, name) for one in owners if hasattr(one, name))
        answer.write_text(json.dumps(scenario(bench, **request["arguments"])))
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
    finally:
        os._exit(code)


def run(bench: Bench, request: dict[str, Any]) -> dict[str, Any]:
    """Forks, waits, kills."""
    answer, stderr = bench.folder / "answer.json", bench.folder / "stderr.log"
    answer.unlink(missing_ok=True)
    process = get_context("fork").Process(target=child, args=(bench, request, answer, stderr))
    process.start()
    process.join(request["seconds"] + GRACE_SECONDS)
    process.kill()
    process.join()
    result = json.loads(answer.read_text()) if answer.exists() else None
    said = stderr.read_text(errors="replace")[-6000:]
    return {"exit": process.exitcode, "result": result, "stderr": said}


def serve(folder: Path, requests: Connection) -> None:
    """Sends the folder of the model and its store, then plays scenarios until nobody asks."""
    torch.set_num_threads(1)  # forks have no other threads of this process
    bench = make_bench(folder)
    gc.freeze()  # a collection in a fork would copy all of this memory
    requests.send(bench.disk)
    with suppress(EOFError):
        while True:
            requests.send(run(bench, requests.recv()))
