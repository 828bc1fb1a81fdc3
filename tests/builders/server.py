"""A server in a process of its own, as a user starts it, on a port of its own."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parents[2]
URL = re.compile(rb"http://\S+(?=/v1)")
START_SECONDS = 60.0


@dataclass
class ServerProcess:
    process: subprocess.Popen
    url: str
    """http://127.0.0.1:PORT"""
    log: Path
    """JSON lines that it writes."""

    @property
    def pid(self) -> int:
        return self.process.pid

    def terminate(self, *, timeout_seconds: float = 40.0) -> int:
        """SIGTERM; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_seconds)


@contextmanager
def server_process(
    folder: Path,
    options: Sequence[str] = (),
    *,
    ready: bool = True,
    environment: dict[str, str] | None = None,
) -> Iterator[ServerProcess]:
    """`python -m runtime serve OPTIONS`; killed at the end, if it has not ended.

    Args:
        folder: for its run folder and log.
        ready: wait until the model is loaded.
    """
    log = folder / "server.log"
    command = [sys.executable, "-m", "runtime", "serve", "port=0", f"run_dir={folder / 'run'}"]
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [*command, *options],
            stdout=subprocess.PIPE,
            stderr=errors,
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = URL.search(line)
        assert found, f"the server did not start: {line!r} {log.read_text()[-2000:]}"
        server = ServerProcess(process, found[0].decode(), log)
        if ready:
            wait_until_ready(server)
        yield server
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def wait_until_ready(server: ServerProcess) -> None:
    deadline = time.monotonic() + START_SECONDS
    while httpx.get(f"{server.url}/ready").status_code != 200:
        assert server.process.poll() is None, server.log.read_text()[-2000:]
        assert time.monotonic() < deadline, server.log.read_text()[-2000:]
        time.sleep(0.05)
