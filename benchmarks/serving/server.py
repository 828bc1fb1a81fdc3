"""The server as a user starts it, in a process of its own, and what can be seen from outside."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import psutil

ROOT = Path(__file__).resolve().parents[2]
URL = re.compile(rb"http://\S+(?=/v1)")
START_SECONDS = 240.0
SAMPLE = re.compile(r"^([\w:]+)(\{.*\})? (\S+)$", re.MULTILINE)

RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
ENDED = "vllm:request_success_total"
PINNED = "moecast_pinned_experts"
TAKEN = (RUNNING, WAITING, PINNED)
"""Gauges that are 0 when nobody wants anything."""


class ServerFailed(RuntimeError):
    """The server did not start, or did not become idle; says what it wrote."""


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    url: str
    """http://127.0.0.1:PORT"""
    log: Path

    @property
    def api(self) -> str:
        """What OpenAI's clients call the base URL."""
        return f"{self.url}/v1"

    def model(self) -> str:
        """The name that it serves under."""
        return httpx2.get(f"{self.api}/models").json()["data"][0]["id"]

    def metrics(self) -> dict[str, float]:
        """Of each name in /metrics the sum over its labels."""
        text = httpx2.get(f"{self.url}/metrics", timeout=30).text
        found: dict[str, float] = {}
        for name, _, value in SAMPLE.findall(text):
            found[name] = found.get(name, 0.0) + float(value)
        return found

    def taken(self) -> dict[str, float]:
        """Running, waiting and pinned."""
        metrics = self.metrics()
        return {name: metrics[name] for name in TAKEN}

    def wait_idle(self, timeout_seconds: float = 240.0) -> float:
        """Seconds until nothing runs, waits or is pinned.

        Raises:
            ServerFailed: something still does.
        """
        start = time.monotonic()
        while any((taken := self.taken()).values()):
            if time.monotonic() - start > timeout_seconds:
                raise ServerFailed(f"after {timeout_seconds:g} s: {taken}")
            time.sleep(0.02)
        return time.monotonic() - start

    def footprint(self) -> dict[str, int]:
        """What the process holds of the system.

        Of its resident memory, pages of files (code of libraries) come as they are first used, and
        go when memory is short; anonymous ones (heap, arenas, stacks) are what a leak would add to.
        """
        process = psutil.Process(self.process.pid)
        memory = process.memory_info()
        return {
            "rss_bytes": memory.rss,
            "anonymous_bytes": memory.rss - memory.shared,
            "descriptors": process.num_fds(),
            "threads": process.num_threads(),
        }

    def end(
        self, number: int = signal.SIGTERM, *, timeout_seconds: float = 240.0
    ) -> dict[str, Any]:
        """Sends a signal; how long it took to exit, with which code, and which children live on."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        start = time.monotonic()
        self.process.send_signal(number)
        code = self.process.wait(timeout_seconds)
        seconds = time.monotonic() - start
        _, alive = psutil.wait_procs(children, timeout=10)
        return {"seconds": seconds, "exit_code": code, "children_left": len(alive)}


@contextmanager
def server(
    options: Mapping[str, Any] | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    ready: bool = True,
) -> Iterator[Server]:
    """`python -m runtime serve` with these options; killed at the end, if it has not ended.

    Args:
        folder: for its log (`server.log`) and run folder (`run`); None: a temporary one.
        ready: wait until the model is loaded.

    Raises:
        ServerFailed: it did not start.
    """
    with ExitStack() as at_the_end:
        if folder is None:
            folder = Path(at_the_end.enter_context(tempfile.TemporaryDirectory()))
        log = folder / "server.log"
        given = {"port": 0, "run_dir": f"{folder / 'run'}"} | dict(options or {})
        command = [
            sys.executable,
            "-m",
            "runtime",
            "serve",
            *(f"{k}={v}" for k, v in given.items()),
        ]
        with log.open("wb") as errors:
            process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=ROOT,
                env={**os.environ, **(environment or {})},
            )
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if (found := URL.search(line)) is None:
                process.wait(START_SECONDS)
                raise ServerFailed(f"{line.decode()} {log.read_text()[-2000:]}")
            started = Server(process, found[0].decode(), log)
            if ready:
                _wait_ready(started)
            yield started
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def _wait_ready(started: Server) -> None:
    deadline = time.monotonic() + START_SECONDS
    while httpx2.get(f"{started.url}/ready", timeout=30).status_code != 200:
        if started.process.poll() is not None or time.monotonic() > deadline:
            raise ServerFailed(started.log.read_text()[-2000:])
        time.sleep(0.05)
