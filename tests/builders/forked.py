"""Programs of this project as forks of a process that has imported it.

Importing PyTorch and Transformers takes 5 s of a CPU, many times what a server of a tiny model
works in a test.
"""

import multiprocessing
import os
import resource
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

from benchmarks.serving import server
from tests.builders.processes import ROOT

T = TypeVar("T")

IMPORTED = ["runtime.serving.app", "runtime.engine.loading", "configs.program"]
IMPORTED += ["transformers.models.qwen2_moe.modeling_qwen2_moe"]


def forks() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    return context


def call_in_forks(function: Callable[..., T], *arguments: Iterable[Any]) -> list[T]:
    """Calls a function with each of its arguments, at once and each in a fork, as `map` does."""
    calls = list(zip(*arguments, strict=True))
    with ProcessPoolExecutor(len(calls), forks(), _set_variables, (dict(os.environ),)) as pool:
        return [one.result() for one in [pool.submit(function, *call) for call in calls]]


def _set_variables(variables: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)


class ForkedProcess:
    """A fork, used as `subprocess.Popen` is; its end is that of `multiprocessing`."""

    def __init__(self, command: Sequence, log: Path, *, environment: Any = None, stdout=None):
        """As `benchmarks.process.start_process` for `[python, "-m", module, *arguments]`."""
        self.stdout, writer = None, None
        if stdout == subprocess.PIPE:
            reader, writer = multiprocessing.Pipe(duplex=False)
            self.stdout = os.fdopen(os.dup(reader.fileno()), "rb")
            reader.close()
        variables = {**os.environ, **(environment or {})}
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        arguments = (list(map(str, command[2:])), variables, limits, log, writer)
        self._process = forks().Process(target=_run_module, args=arguments)
        self._process.start()
        if writer is not None:
            writer.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int | None:
        self._process.join(timeout)
        if self._process.is_alive():
            raise subprocess.TimeoutExpired(str(self._process), timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run_module(arguments: list[str], environment: dict, open_files: tuple, log: Path, stdout: Any):
    with log.open("wb") as file:
        os.dup2(file.fileno(), 2)
        os.dup2((stdout or file).fileno(), 1)
    if stdout is not None:
        stdout.close()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    resource.setrlimit(resource.RLIMIT_NOFILE, open_files)
    os.chdir(ROOT)
    _set_variables(environment)
    sys.argv = arguments
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)


@contextmanager
def run_server(options: Mapping | None = None, **more: Any) -> Iterator[server.ServerProcess]:
    """`benchmarks.serving.server.run_server`, whose process is a fork."""
    forking = patch.object(server, "start_process", ForkedProcess)
    with forking, server.run_server(options, **more) as started:
        yield started
