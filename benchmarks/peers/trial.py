"""One run of one peer: a process of its own, under the limit, from a cold page cache."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.environments import interpreter, is_built
from benchmarks.peers.limit import File, Limiter
from benchmarks.peers.peers import Peer, Weights
from predictors.units import MIB

ROOT = Path(__file__).parents[2]
TIMEOUT_SECONDS = 300.0
"""Importing, loading and all prompts; each prompt has its own, shorter end."""
PREPARE_SECONDS = 600.0


class CannotRun(RuntimeError):
    """A peer that gives no answer, with the reason in one line."""


@dataclass(frozen=True)
class Questions:
    prompts: list[list[int]]
    new_tokens: int
    seconds_per_prompt: float
    threads: int


@dataclass(frozen=True)
class Place:
    """Where this run's files are."""

    work: Path
    weights: dict[Weights, Path]

    @property
    def environments(self) -> Path:
        return self.work / "environments"

    def scratch(self, peer: Peer) -> Path:
        folder = self.work / "scratch" / peer.name
        folder.mkdir(parents=True, exist_ok=True)
        return folder.resolve()


def weight_files(peer: Peer, place: Place) -> list[Path]:
    """What the peer reads its weights from."""
    root = place.scratch(peer) if peer.own_files else place.weights[peer.weights]
    if root.is_file():
        return [root]
    return sorted(path for path in root.rglob("*") if path.is_file())


def last_line(path: Path) -> str:
    """Of what a process wrote before it failed; files in this checkout by their relative paths."""
    text = path.read_text(errors="replace").replace(f"{ROOT}/", "")
    lines = [line.strip() for line in text.splitlines()]
    return next((line for line in reversed(lines) if line), "no message")


def start(peer: Peer, questions: Questions, budget_bytes: int, place: Place) -> subprocess.Popen:
    """The worker's process, running.

    Raises:
        CannotRun: its environment is not there.
    """
    python = Path(sys.executable)
    if peer.environment is not None:
        python = interpreter(peer.environment, place.environments).absolute()
        if not is_built(peer.environment, place.environments):
            build = f"python -m benchmarks.peers.environments only={peer.environment}"
            raise CannotRun(f"no environment; build it: {build}")
    scratch = place.scratch(peer)
    request = {
        "weights": str(place.weights[peer.weights].resolve()),
        **asdict(questions),
        "budget_bytes": budget_bytes,
        "scratch": str(scratch),
        "options": peer.options,
    }
    logs = place.work / "logs"
    logs.mkdir(exist_ok=True)
    (logs / f"{peer.name}.request.json").write_text(json.dumps(request))
    report_path(peer, place).unlink(missing_ok=True)
    with (logs / f"{peer.name}.log").open("w") as log:
        return subprocess.Popen(
            [
                str(python),
                str(peer.script),
                str(logs / f"{peer.name}.request.json"),
                str(report_path(peer, place)),
            ],
            env=os.environ | {"PYTHONPATH": str(ROOT) if peer.environment is None else ""},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


def report_path(peer: Peer, place: Place) -> Path:
    return (place.work / "logs" / f"{peer.name}.report.json").absolute()


def finished(peer: Peer, process: subprocess.Popen, place: Place) -> dict[str, Any]:
    """The worker's report.

    Raises:
        CannotRun: it failed; with the last line that it wrote.
    """
    if process.returncode != 0:
        raise CannotRun(last_line(place.work / "logs" / f"{peer.name}.log"))
    return json.loads(report_path(peer, place).read_text())


def prepare(peer: Peer, place: Place) -> None:
    """Lets a peer write its own layout once, without a limit.

    Raises:
        CannotRun: it failed.
    """
    done = place.scratch(peer) / "prepared"
    if not peer.own_files or done.exists():
        return
    process = start(peer, Questions([], 0, 0.0, os.cpu_count() or 1), 0, place)
    try:
        process.wait(PREPARE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise CannotRun(f"did not write its own layout in {PREPARE_SECONDS:.0f} s") from None
    finished(peer, process, place)
    done.touch()


def run(
    peer: Peer, questions: Questions, *, budget_bytes: int, limit_bytes: int, place: Place
) -> dict[str, Any]:
    """What the worker reports, and what watching it showed.

    Raises:
        CannotRun: no environment, an error, more memory than the limit, or no end.
    """
    files = weight_files(peer, place)
    for path in files:
        file = File(path)
        file.drop()
        file.close()
    process = start(peer, questions, budget_bytes, place)
    limiter = Limiter(process, files, limit_bytes)
    try:
        limiter.watch(TIMEOUT_SECONDS)
    except TimeoutError as error:
        raise CannotRun(str(error)) from None
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
    if limiter.was_killed:
        needed, limit = limiter.peak.anonymous / MIB, limit_bytes / MIB
        raise CannotRun(f"killed: {needed:.0f} MiB of its own memory, above {limit:.0f} MiB")
    report = finished(peer, process, place)
    report["peak_anonymous_bytes"] = limiter.peak.anonymous
    report["peak_cached_bytes"] = limiter.peak.cached
    report["peak_charged_bytes"] = limiter.peak.together
    report["mean_charged_bytes"] = limiter.mean_charged_bytes()
    report["limiter_busy_seconds"] = limiter.busy_seconds
    return report
