"""Child processes: workers that read a request and write a report, and programs that print."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from predictors.files import to_plain_json

ROOT = Path(__file__).resolve().parents[1]
MESSAGE_CHARACTERS = 1500


class ProcessFailed(RuntimeError):
    """A child process failed or exceeded its time limit; the message says why."""


@dataclass
class WorkerProcess:
    """A running process that was started as `COMMAND REQUEST.json REPORT.json`."""

    process: subprocess.Popen[bytes]
    report: Path
    log: Path

    def finish(self, timeout_seconds: float) -> dict[str, Any]:
        """Waits for the end and returns the report; kills the process after the time limit.

        Raises:
            ProcessFailed: it failed or exceeded its time limit.
        """
        try:
            self.process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            raise ProcessFailed(f"no end after {timeout_seconds:.0f} s") from None
        finally:
            self.kill()
        return self.read_report()

    def kill(self) -> None:
        """Ends the process if it is still running."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def read_report(self) -> dict[str, Any]:
        """Returns the report of a process that has ended.

        Raises:
            ProcessFailed: it failed; the message is the last line that it wrote.
        """
        if self.process.returncode != 0 or not self.report.exists():
            raise ProcessFailed(last_line(self.log))
        return json.loads(self.report.read_text())


def start_process(
    command: Sequence[str | Path],
    log: Path,
    *,
    environment: Mapping[str, str] | None = None,
    stdout: int | None = None,
) -> subprocess.Popen[bytes]:
    """Starts a process in this checkout that writes to a log.

    Args:
        environment: variables on top of this process's own.
        stdout: `subprocess.PIPE` keeps standard output out of the log.
    """
    with log.open("wb") as file:
        return subprocess.Popen(
            list(map(str, command)),
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=file if stdout is None else stdout,
            stderr=file,
        )


def start_worker(
    command: Sequence[str | Path],
    request: Any,
    folder: Path,
    *,
    name: str = "worker",
    environment: Mapping[str, str] | None = None,
) -> WorkerProcess:
    """Starts a worker.

    Args:
        command: a script, or `-m` and a module, for this interpreter; another program's path first
            for another one.
        request: a dataclass or a mapping.
        folder: for the request, the report and the log, all named after `name`.
    """
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    request_path, report_path = (folder / f"{name}.{kind}.json" for kind in ("request", "report"))
    document = request if isinstance(request, Mapping) else asdict(request)
    request_path.write_text(json.dumps(document, default=to_plain_json))
    report_path.unlink(missing_ok=True)
    log = folder / f"{name}.log"
    process = start_process([*command, request_path, report_path], log, environment=environment)
    return WorkerProcess(process, report_path, log)


def run_program(
    command: Sequence[str | Path],
    *,
    timeout_seconds: float | None = None,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Runs a program and returns what it printed.

    Raises:
        ProcessFailed: it failed or exceeded its time limit; the message ends with its output.
    """
    try:
        done = subprocess.run(
            list(map(str, command)),
            capture_output=True,
            text=True,
            cwd=folder,
            env={**os.environ, **(environment or {})},
            check=False,
            timeout=timeout_seconds,
        )
    except subprocess.TimeoutExpired:
        raise ProcessFailed(f"no end after {timeout_seconds:.0f} s") from None
    if done.returncode != 0:
        output = (done.stderr or done.stdout)[-MESSAGE_CHARACTERS:]
        raise ProcessFailed(f"exit code {done.returncode}: {output}")
    return done.stdout


def python_module(module: str) -> list[str]:
    """Returns the command that runs a module of this project with this interpreter."""
    return [sys.executable, "-m", module]


def last_line(path: Path) -> str:
    """Returns the last line of a log; files of this checkout have relative paths in it."""
    text = path.read_text(errors="replace").replace(f"{ROOT}/", "")
    lines = [line.strip() for line in text.splitlines()]
    return next((line for line in reversed(lines) if line), "no message")
