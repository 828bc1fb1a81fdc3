"""launcher=local: processes of this machine.

Each is a `ProcessPoolExecutor` with one process: one that dies breaks only the pool that it is in,
and each has a separate environment and log.
"""

import multiprocessing
import os
import signal
import sys
import threading
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection
from pathlib import Path

from collect.launch.config import LauncherConfig
from collect.launch.group import WorkerGroup
from collect.launch.worker import UnitWorker

_worker: UnitWorker
"""The worker that this process is, if it is one."""


class LocalEngine(WorkerGroup):
    """Processes, each with a log FOLDER/worker-N.log."""

    def __init__(self, config: LauncherConfig, worker: UnitWorker, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self.logs = str(folder)

        def start(number: int) -> LocalProcess:
            log = folder / f"worker-{number}.log"
            return LocalProcess(worker, log, visible_gpus(config, number))

        super().__init__(start, config.workers, lambda error: isinstance(error, BrokenProcessPool))


class LocalProcess:
    """A process that ends with this one, or when it is closed, even in the middle of a unit."""

    def __init__(self, worker: UnitWorker, log: Path, gpus: str | None):
        context = multiprocessing.get_context("spawn")
        # Nothing is ever written: when this end closes, the process exits.
        theirs, self._lifeline = context.Pipe(duplex=False)
        self._pool = ProcessPoolExecutor(
            1, mp_context=context, initializer=_begin, initargs=(worker, str(log), gpus, theirs)
        )
        self.opened = self._pool.submit(_open)

    def submit(self, unit: str) -> Future[str]:
        try:
            return self._pool.submit(_run, unit)
        except BrokenProcessPool as error:
            # It died between two units.
            failed: Future[str] = Future()
            failed.set_exception(error)
            return failed

    def close(self) -> None:
        self._lifeline.close()
        self._pool.shutdown(cancel_futures=True)


def visible_gpus(config: LauncherConfig, worker: int) -> str | None:
    """Returns the worker's share of the GPUs that are visible here, for CUDA_VISIBLE_DEVICES."""
    if not config.gpus:
        return None
    first, last = worker * config.gpus, (worker + 1) * config.gpus
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return ",".join((visible.split(",") if visible else list(map(str, range(last))))[first:last])


def _begin(worker: UnitWorker, log: str, gpus: str | None, lifeline: Connection) -> None:
    global _worker
    # Ctrl-C is for the command, which then ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    if gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus
    _worker = worker

    def end_with_parent() -> None:
        lifeline.poll(None)
        sys.stdout.flush()
        # A unit that is not committed is done again.
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def _open() -> None:
    _worker.open()


def _run(unit: str) -> str:
    return _worker.run(unit)
