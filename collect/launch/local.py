"""launcher=local: a process pool of this machine.

Each worker is a `ProcessPoolExecutor` with one process: a process that dies breaks only the pool
that it is in, so that it costs one unit, and has a separate environment and log.
"""

import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection
from pathlib import Path

from collect.launch.config import LauncherConfig
from collect.launch.worker import UnitResult, UnitWorker

_worker: UnitWorker
"""The worker that this process is, if it is one."""


class LocalEngine:
    """Processes, each with a log FOLDER/worker-N.log."""

    def __init__(self, config: LauncherConfig, worker: UnitWorker, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self.logs = str(folder)
        self._workers = [
            LocalWorker(worker, folder / f"worker-{number}.log", visible_gpus(config, number))
            for number in range(config.workers)
        ]

    def run(self, units: Sequence[str]) -> Iterator[UnitResult]:
        waiting, idle = deque(units), list(self._workers)
        running: dict[Future[str], tuple[LocalWorker, str]] = {}
        while waiting or running:
            while waiting and idle:
                worker, unit = idle.pop(0), waiting.popleft()
                running[worker.submit(unit)] = worker, unit
            ended, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in ended:
                worker, unit = running.pop(future)
                idle.append(worker)
                try:
                    yield UnitResult.from_json(future.result())
                except BrokenProcessPool:
                    worker.restart()
                    yield UnitResult(unit=unit, error="its worker process died")

    def close(self) -> None:
        for worker in self._workers:
            worker.close()


class LocalWorker:
    """A process that ends with this one, or when it is closed, even in the middle of a unit."""

    def __init__(self, worker: UnitWorker, log: Path, gpus: str | None):
        self._arguments = worker, str(log), gpus
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        # Nothing is ever written: when this end closes, the process exits.
        theirs, self._lifeline = context.Pipe(duplex=False)
        self._pool = ProcessPoolExecutor(
            1, mp_context=context, initializer=_begin, initargs=(*self._arguments, theirs)
        )
        # All load their models at the same time; an error is reported by the first unit.
        self._pool.submit(_open)

    def submit(self, unit: str) -> Future[str]:
        try:
            return self._pool.submit(_run, unit)
        except BrokenProcessPool:
            # It died between two units.
            self.restart()
            return self._pool.submit(_run, unit)

    def restart(self) -> None:
        self.close()
        self._start()

    def close(self) -> None:
        self._lifeline.close()
        self._pool.shutdown(cancel_futures=True)


def visible_gpus(config: LauncherConfig, worker: int) -> str | None:
    """The worker's share of the GPUs that are visible here, for CUDA_VISIBLE_DEVICES."""
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
