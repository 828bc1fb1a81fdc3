"""Runs jobs over processes; every finished cell is a file, so that the next run goes on from it."""

import hashlib
import json
import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

from predictors.files import write_atomic
from train.evaluate.replaying import Job, run_job

CODE = (
    "predictors",
    "runtime/policy",
    "runtime/sim",
    "train/evaluate/replaying.py",
    "train/evaluate/steps.py",
    "train/evaluate/forecasts.py",
)
"""What a replay's figures depend on, beside its settings."""

POLL_SECONDS = 0.5
"""How often the bar looks for finished cells."""


class Cells:
    """The run folder's finished cells, one JSON file each, named by their digest."""

    def __init__(self, folder: Path):
        self._folder = folder

    def path(self, digest: str) -> Path:
        return self._folder / f"{digest}.json"

    def get(self, digest: str) -> dict[str, Any] | None:
        """The figures of a cell, or None when it is not finished."""
        path = self.path(digest)
        return json.loads(path.read_bytes()) if path.exists() else None

    def keep(self, digest: str, figures: dict[str, Any]) -> None:
        """Whole or not at all: an interrupted run leaves no half of a cell."""
        write_atomic(self.path(digest), json.dumps(figures, allow_nan=False).encode())


def code_digest() -> str:
    """sha256 hex over the sources that replays run: another version replays again."""
    root = Path(__file__).resolve().parents[2]
    whole = hashlib.sha256()
    for place in map(root.joinpath, CODE):
        for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            whole.update(path.read_bytes())
    return whole.hexdigest()


def run_jobs(
    jobs: Sequence[Job], *, folder: Path, workers: int, advance: Callable[[int], None]
) -> None:
    """Runs the jobs, the longest first, and keeps each cell as it is finished.

    `advance` is told how many more are.

    One worker is this process. Ctrl-C ends the others at once; what is finished stays.
    """
    ordered = sorted(jobs, key=lambda job: len(job.cells) * (1 + 1 / job.batch), reverse=True)
    cells = Cells(folder)
    if workers == 1 or len(jobs) == 1:
        for job in ordered:

            def done(digest: str, figures: dict[str, Any]) -> None:
                cells.keep(digest, figures)
                advance(1)

            run_job(job, done)
        return
    # Spawned, not forked: this process may have threads (onnxruntime, the progress bar).
    context = multiprocessing.get_context("spawn")
    others = set(multiprocessing.active_children())
    digests = [digest for job in jobs for digest, _ in job.cells]
    with ProcessPoolExecutor(
        max_workers=min(workers, len(jobs)), mp_context=context, initializer=_ignore_interrupts
    ) as pool:
        futures = [pool.submit(_work, job, folder) for job in ordered]
        try:
            for num_done in _watched(futures, cells, digests):
                advance(num_done)
        except BaseException:
            # Leaving the pool would wait for jobs that nobody wants any more.
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _watched(
    futures: Iterable[Future[None]], cells: Cells, digests: Iterable[str]
) -> Iterator[int]:
    """How many more cells are finished, now and then until all are; raises what a job raised."""
    running, left = set(futures), set(digests)
    while running:
        finished, running = wait(running, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
        for future in finished:
            future.result()
        done = {digest for digest in left if cells.path(digest).exists()}
        left -= done
        yield len(done)


def _ignore_interrupts() -> None:
    """Ctrl-C reaches every process of the terminal; the first one decides what it means."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _work(job: Job, folder: Path) -> None:
    cells = Cells(folder)
    run_job(job, cells.keep)
