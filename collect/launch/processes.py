"""Workers that do one unit at a time, and processes of this machine as such (launcher=local).

A worker opens the work once, then does unit after unit. Its entry point is named as
`package.module:function`, takes JSON arguments by keyword and returns a function from a unit's name
to a JSON value. That function commits its result by an atomic rename and does nothing where the
result exists already, so that a unit may be tried twice.

A worker that dies costs its unit and is replaced. A process of this machine is a
`ProcessPoolExecutor` with one process: one that dies breaks only the pool that it is in, and each
has a separate environment and log.
"""

import json
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from collect.config import LauncherConfig
from predictors.errors import MoecastError, describe_error
from runtime.library_defaults import set_library_defaults

DoUnit = Callable[[str], Any]


@dataclass(frozen=True, kw_only=True)
class UnitResult:
    """The outcome of one attempt at a unit."""

    unit: str
    value: Any = None
    """JSON that the entry point's function returned."""
    error: str = ""
    """One line; empty for a success."""
    is_fatal: bool = False
    """A retry cannot help: the user's error, or the work cannot be opened."""

    def at(self, place: str) -> "UnitResult":
        """Returns a result whose error names the place, unless the error is the user's."""
        if not self.error or self.is_fatal:
            return self
        return replace(self, error=f"{self.error} ({place})")

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "UnitResult":
        return cls(**json.loads(text))


@dataclass
class UnitWorker:
    """Does units of one entry point, which it opens once."""

    entry: str
    arguments: str
    threads: int
    _do: DoUnit | None = None

    def open(self) -> None:
        """Loads the model or whatever the work needs, unless that was done before.

        Returns nothing: an actor's result is pickled, and a served model cannot be.
        """
        if self._do is None:
            # Before torch is imported, which reads them once.
            os.environ["OMP_NUM_THREADS"] = str(self.threads)
            set_library_defaults()
            module, _, function = self.entry.partition(":")
            self._do = getattr(import_module(module), function)(**json.loads(self.arguments))
            if "torch" in sys.modules:
                sys.modules["torch"].set_num_threads(self.threads)

    def run(self, unit: str) -> str:
        """Returns the `UnitResult` as JSON; an exception's traceback goes to the log."""
        try:
            self.open()
            assert self._do is not None
            return UnitResult(unit=unit, value=self._do(unit)).to_json()
        except Exception as error:
            # Whatever the exception, a model that is loaded stays so for the next unit.
            is_fatal = self._do is None or isinstance(error, MoecastError)
            return UnitResult(unit=unit, error=_describe(error), is_fatal=is_fatal).to_json()


def _describe(error: Exception) -> str:
    """One line for the pool; the traceback goes to the worker's log."""
    if isinstance(error, MoecastError):
        return str(error)
    traceback.print_exc()
    return describe_error(error)


_worker: UnitWorker
"""The worker that this process is, if it is one."""


class UnitProcess(Protocol):
    """A process with a `UnitWorker`; its futures fail if it dies."""

    opened: Future[Any]
    """Ends when the worker has opened its work, or cannot."""

    def submit(self, unit: str) -> Future[str]:
        """Runs `UnitWorker.run`."""
        ...

    def close(self) -> None:
        """Ends the process, whatever it is doing."""
        ...


class WorkerGroup:
    """A number of such processes.

    Args:
        start: Starts the process of a number from 0 on.
        num_workers: The number of processes.
        has_died: Whether a future's exception means that its process died.
        poll_seconds: Interval of the calls of `on_poll` while nothing ends.
    """

    def __init__(
        self,
        start: Callable[[int], UnitProcess],
        num_workers: int,
        has_died: Callable[[BaseException | None], bool],
        *,
        poll_seconds: float | None = None,
    ):
        self._start_process = start
        self._has_died = has_died
        self._poll_seconds = poll_seconds
        self.workers: dict[int, Any] = {}
        self._running: dict[Future[Any], tuple[int, str | None]] = {}
        """Worker and unit of each call; without a unit, the worker is opening its work."""
        self._idle: list[int] = []
        for number in range(num_workers):
            self._start(number)

    def _start(self, number: int) -> None:
        self.workers[number] = self._start_process(number)
        # All load their models at the same time.
        self._running[self.workers[number].opened] = number, None

    @property
    def is_working(self) -> bool:
        """True if a worker has a unit."""
        return any(unit is not None for _, unit in self._running.values())

    def run(self, units: Sequence[str]) -> Iterator[UnitResult]:
        """Tries each unit once and yields results as they come."""
        waiting = deque(units)
        while waiting or self.is_working:
            while waiting and self._idle:
                number, unit = self._idle.pop(), waiting.popleft()
                self._running[self.workers[number].submit(unit)] = number, unit
            self.on_poll()
            ended, _ = wait(self._running, timeout=self._poll_seconds, return_when=FIRST_COMPLETED)
            for future in ended:
                number, done = self._running.pop(future)
                error = future.exception()
                if self._has_died(error):
                    self.on_death()
                    self.workers[number].close()
                    self._start(number)
                    if done is None and waiting:
                        # A try of some unit, so that workers that cannot start are given up.
                        done = waiting.popleft()
                    if done is not None:
                        said = " ".join(str(error).split())[:300]
                        yield UnitResult(unit=done, error=f"its worker process died: {said}")
                    continue
                self._idle.append(number)
                # Work that could not be opened is reported by the worker's first unit.
                if done is not None:
                    yield UnitResult.from_json(future.result())

    def on_poll(self) -> None:
        """Called before each wait for a worker."""

    def on_death(self) -> None:
        """Called when a worker has died, before it is replaced."""

    def close(self) -> None:
        """Ends every worker, whatever it is doing."""
        for worker in self.workers.values():
            worker.close()


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
