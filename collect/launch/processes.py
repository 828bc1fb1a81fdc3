"""Workers that do one unit at a time, and processes of this machine as such (launcher=local).

A worker opens the work once, then does unit after unit. Its entry point is named as
`package.module:function`, takes JSON arguments by keyword and returns a function from a unit's name
to a JSON value. That function commits its result by an atomic rename and does nothing where the
result exists already, so that a unit may be tried twice.

A worker that dies costs its unit and is replaced. A process of this machine is a
`ProcessPoolExecutor` with one process: one that dies breaks only the pool that it is in, and each
has a separate environment and log.
"""

import multiprocessing
import os
import signal
import sys
import threading
import traceback
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from collect.config import LauncherConfig
from collect.errors import LaunchError
from predictors.errors import MoecastError, describe_error
from runtime.library_defaults import set_library_defaults

DoUnit = Callable[[str], Any]
Say = Callable[[str], object]

VISIBLE = "CUDA_VISIBLE_DEVICES"


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


@dataclass
class UnitWorker:
    """Does units of one entry point, which it opens once."""

    entry: str
    arguments: dict[str, Any]
    """Plain values: a job itself would import torch before `threads` is set."""
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
            self._do = getattr(import_module(module), function)(**self.arguments)
            if "torch" in sys.modules:
                sys.modules["torch"].set_num_threads(self.threads)

    def run(self, unit: str) -> UnitResult:
        """Tries a unit; an exception's traceback goes to the log."""
        try:
            self.open()
            assert self._do is not None
            return UnitResult(unit=unit, value=self._do(unit))
        except MoecastError as error:
            return UnitResult(unit=unit, error=str(error), is_fatal=True)
        except Exception as error:
            traceback.print_exc()
            # Whatever the exception, a model that is loaded stays so for the next unit.
            return UnitResult(unit=unit, error=describe_error(error), is_fatal=self._do is None)


class WorkerPool(ABC):
    """Workers of one kind, which keep what they have loaded until the `with` block ends.

    `say` is called with a line for each attempt that failed, for what happens to jobs, and for
    workers that cannot start.
    """

    logs: str
    """The place of their output, for error messages."""

    def __init__(self, config: LauncherConfig, say: Say):
        self.config = config
        self.say = say
        self.counts = {"units": 0, "retried": 0}
        """Of the last `run`."""

    @abstractmethod
    def attempt(self, units: Sequence[str]) -> Iterator[UnitResult]:
        """Tries each unit once and yields results as they come.

        A unit that no worker began, since one of them died, has no result.
        """

    @abstractmethod
    def close(self) -> None:
        """Ends every worker, whatever it is doing."""

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self, units: Sequence[str], *, advance: Callable[[str], object] = lambda _: None
    ) -> dict[str, Any]:
        """Returns the value of each unit; `advance` is called with each unit that is done.

        Raises:
            LaunchError: an error of the user at once; otherwise, when all other units are done, the
                units that failed more than `launcher.retries` times.
        """
        retries = self.config.retries
        self.counts = {"units": len(units), "retried": 0}
        values: dict[str, Any] = {}
        errors: dict[str, str] = {}
        tries: Counter[str] = Counter()
        waiting = list(units)
        vain_rounds = 0
        # One more than a unit's tries: what stands behind it in a job's share has its turn, too.
        while waiting and vain_rounds <= retries + 1:
            vain_rounds += 1
            for result in self.attempt(waiting):
                unit = result.unit
                if result.is_fatal:
                    raise LaunchError(result.error)
                if not result.error:
                    values[unit] = result.value
                    vain_rounds = 0
                    advance(unit)
                    continue
                errors[unit] = result.error
                tries[unit] += 1
                is_last = tries[unit] > retries
                self.counts["retried"] += not is_last
                then = "given up" if is_last else "tried again"
                self.say(f"{unit[:12]} is {then}: {result.error}; logs: {self.logs}")
            waiting = [u for u in waiting if u not in values and tries[u] <= retries]
        failed = [unit for unit in units if unit not in values]
        if failed:
            unit = next((unit for unit in failed if unit in errors), failed[0])
            raise LaunchError(
                f"{len(failed)} of {len(units)} units failed, the others are done. {unit}: "
                f"{errors.get(unit, 'no worker came to it')}; logs: {self.logs}. Run the "
                "same command again: it does only what is missing"
            )
        return values


class WorkerGroup(WorkerPool):
    """`launcher.workers` processes with a `UnitWorker` each.

    A subclass starts them: what `start` returns has `submit(unit)`, which runs `UnitWorker.run`,
    `opened`, a future that ends when the worker has opened its work, or cannot, and `close()`,
    which ends the process, whatever it is doing. Futures fail if it dies.
    """

    poll_seconds: float | None = None
    """Interval of the calls of `on_poll` while nothing ends."""

    def __init__(self, config: LauncherConfig, say: Say):
        super().__init__(config, say)
        self.workers: dict[int, Any] = {}
        self._running: dict[Future[Any], tuple[int, str | None]] = {}
        """Worker and unit of each call; without a unit, the worker is opening its work."""
        self._idle: list[int] = []
        for number in range(config.workers):
            self._start(number)

    @abstractmethod
    def start(self, number: int) -> Any:
        """Starts the process of a number from 0 on."""

    @abstractmethod
    def has_died(self, error: BaseException | None) -> bool:
        """Whether a future's exception means that its process died."""

    def _start(self, number: int) -> None:
        self.workers[number] = self.start(number)
        # All load their models at the same time.
        self._running[self.workers[number].opened] = number, None

    def attempt(self, units: Sequence[str]) -> Iterator[UnitResult]:
        waiting = deque(units)
        while waiting or any(unit is not None for _, unit in self._running.values()):
            while waiting and self._idle:
                number, unit = self._idle.pop(), waiting.popleft()
                self._running[self.workers[number].submit(unit)] = number, unit
            self.on_poll()
            ended, _ = wait(self._running, timeout=self.poll_seconds, return_when=FIRST_COMPLETED)
            for future in ended:
                number, done = self._running.pop(future)
                error = future.exception()
                if self.has_died(error):
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
                    yield future.result()

    def on_poll(self) -> None:
        """Called before each wait for a worker."""

    def on_death(self) -> None:
        """Called when a worker has died, before it is replaced."""

    def close(self) -> None:
        for worker in self.workers.values():
            worker.close()


class LocalEngine(WorkerGroup):
    """Processes, each with a log FOLDER/worker-N.log."""

    def __init__(self, config: LauncherConfig, worker: UnitWorker, folder: Path, say: Say):
        self._worker, self._gpus = worker, share_gpus(config)
        folder.mkdir(parents=True, exist_ok=True)
        self.logs = str(folder)
        super().__init__(config, say)

    def start(self, number: int) -> "LocalProcess":
        log = f"{self.logs}/worker-{number}.log"
        return LocalProcess(self._worker, log, self._gpus[number])

    def has_died(self, error: BaseException | None) -> bool:
        return isinstance(error, BrokenProcessPool)


class LocalProcess:
    """A process that ends with this one, or when it is closed, even in the middle of a unit."""

    def __init__(self, worker: UnitWorker, log: str, gpus: str | None):
        context = multiprocessing.get_context("spawn")
        # Nothing is ever written: when this end closes, the process exits.
        theirs, self._lifeline = context.Pipe(duplex=False)
        self._pool = ProcessPoolExecutor(
            1, mp_context=context, initializer=_begin, initargs=(worker, log, gpus, theirs)
        )
        self.opened = self._pool.submit(_open)

    def submit(self, unit: str) -> Future[UnitResult]:
        try:
            return self._pool.submit(_run, unit)
        except BrokenProcessPool as error:
            # It died between two units.
            failed: Future[UnitResult] = Future()
            failed.set_exception(error)
            return failed

    def close(self) -> None:
        self._lifeline.close()
        self._pool.shutdown(cancel_futures=True)


_worker: UnitWorker
"""The worker that this process is, if it is one."""


def share_gpus(config: LauncherConfig) -> list[str | None]:
    """Returns each worker's share of the GPUs that are visible here, for CUDA_VISIBLE_DEVICES.

    Raises LaunchError if there are too few: a worker without its share would compute on the CPU.
    """
    if not config.gpus:
        return [None] * config.workers
    listed = os.environ.get(VISIBLE)
    if listed is None:
        from runtime.accelerator import list_accelerators  # imports torch

        gpus = [str(device.index) for device in list_accelerators()]
    else:
        gpus = [one for one in listed.split(",") if one.strip() not in ("", "-1")]
    if config.workers * config.gpus > len(gpus):
        given = "" if listed is None else f" ({VISIBLE}={listed!r})"
        raise LaunchError(
            f"launcher.workers={config.workers} with launcher.gpus={config.gpus} each: "
            f"{len(gpus)} GPUs are visible here{given}; lower one of them, or launcher.gpus=0"
        )
    starts = range(0, config.workers * config.gpus, config.gpus)
    return [",".join(gpus[start : start + config.gpus]) for start in starts]


def _begin(worker: UnitWorker, log: str, gpus: str | None, lifeline: Connection) -> None:
    global _worker
    # Ctrl-C is for the command, which then ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    if gpus is not None:
        os.environ[VISIBLE] = gpus
    _worker = worker

    def end_with_parent() -> None:
        lifeline.poll(None)
        sys.stdout.flush()
        # A unit that is not committed is done again.
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def _open() -> None:
    _worker.open()


def _run(unit: str) -> UnitResult:
    return _worker.run(unit)
