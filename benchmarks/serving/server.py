"""The server as a separate process, as a user starts it, and its state as seen from outside."""

import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import psutil

from benchmarks.process import python_module, start_process
from benchmarks.serving.rows import Footprint, ServerExit

URL = re.compile(rb"http://\S+(?=/v1)")
START_SECONDS = 240.0
SAMPLE = re.compile(r"^([\w:]+)(\{.*\})? (\S+)$", re.MULTILINE)

RUNNING_GAUGE, WAITING_GAUGE = "vllm:num_requests_running", "vllm:num_requests_waiting"
PINNED_GAUGE = "moecast_pinned_experts"
IDLE_GAUGES = (RUNNING_GAUGE, WAITING_GAUGE, PINNED_GAUGE)
"""Gauges that are 0 when the server is idle."""


class ServerFailed(RuntimeError):
    """The server did not start, or did not become idle."""


@dataclass
class ServerProcess:
    """A running server."""

    process: subprocess.Popen[bytes]
    url: str
    """http://127.0.0.1:PORT"""
    log: Path

    @property
    def api(self) -> str:
        """The base URL of OpenAI's clients."""
        return f"{self.url}/v1"

    def model(self) -> str:
        """Returns the name of the served model."""
        return ask(f"{self.api}/models").json()["data"][0]["id"]

    def metrics(self) -> dict[str, float]:
        """Returns the metrics, each summed over its labels."""
        text = ask(f"{self.url}/metrics").text
        metrics: dict[str, float] = {}
        for name, _, value in SAMPLE.findall(text):
            metrics[name] = metrics.get(name, 0.0) + float(value)
        return metrics

    def idle_gauges(self) -> dict[str, float]:
        """Returns the numbers of running and waiting requests, and of pinned experts."""
        metrics = self.metrics()
        return {name: metrics[name] for name in IDLE_GAUGES}

    def wait_idle(self, timeout_seconds: float = 240.0) -> float:
        """Waits until nothing runs, waits or is pinned; returns the seconds.

        Raises:
            ServerFailed: the server is not idle after the time limit.
        """
        start = time.monotonic()
        while any((gauges := self.idle_gauges()).values()):
            if time.monotonic() - start > timeout_seconds:
                raise ServerFailed(f"not idle after {timeout_seconds:g} s: {gauges}")
            time.sleep(0.02)
        return time.monotonic() - start

    def footprint(self) -> Footprint:
        """Returns the resources of the process."""
        process = psutil.Process(self.process.pid)
        memory = process.memory_info()
        return Footprint(
            rss_bytes=memory.rss,
            anonymous_bytes=memory.rss - memory.shared,
            descriptors=process.num_fds(),
            threads=process.num_threads(),
        )

    def stop(self, *, timeout_seconds: float = 240.0) -> ServerExit:
        """Sends SIGTERM and waits for the end."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        start = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(timeout_seconds)
        seconds = time.monotonic() - start
        _, alive = psutil.wait_procs(children, timeout=10)
        return ServerExit(seconds=seconds, exit_code=code, children_left=len(alive))


@contextmanager
def run_server(
    options: Mapping[str, Any] | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    ready: bool = True,
) -> Iterator[ServerProcess]:
    """Runs `python -m runtime serve` with these options; kills it at the end if it still runs.

    Args:
        options: Options of the command.
        environment: Variables on top of this process's own.
        folder: Folder for `server.log` and the run folder `run`; None: a temporary one.
        ready: Wait until the model is loaded.

    Raises:
        ServerFailed: it did not start.
    """
    with ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        log = folder / "server.log"
        given = {"port": 0, "run_dir": folder / "run"} | dict(options or {})
        command = [*python_module("runtime"), "serve", *(f"{k}={v}" for k, v in given.items())]
        process = start_process(command, log, environment=environment, stdout=subprocess.PIPE)
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if (url := URL.search(line)) is None:
                process.wait(START_SECONDS)
                raise ServerFailed(f"{line.decode()} {log.read_text()[-2000:]}")
            started = ServerProcess(process, url[0].decode(), log)
            if ready:
                wait_ready(started)
            yield started
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def ask(url: str) -> httpx2.Response:
    """Returns the answer, without certificates, whose loading takes as long as a server's step."""
    return httpx2.get(url, timeout=30, verify=False)


def wait_ready(target: ServerProcess) -> None:
    """Waits until the model is loaded.

    Raises:
        ServerFailed: the server ended, or takes too long.
    """
    deadline = time.monotonic() + START_SECONDS
    while ask(f"{target.url}/ready").status_code != 200:
        if target.process.poll() is not None or time.monotonic() > deadline:
            raise ServerFailed(target.log.read_text()[-2000:])
        time.sleep(0.05)
