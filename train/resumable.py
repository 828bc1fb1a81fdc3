"""Work that is done in pieces over several processes; each finished piece is a file."""

import json
import multiprocessing
import signal
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from predictors.files import write_atomic

OnFinished = Callable[[str, Mapping[str, Any]], None]
"""Called with a piece's digest and figures, which must be plain JSON."""


class ResumableJob(Protocol):
    """Pieces of work that share what is made once for all of them. It is sent to other processes.

    A digest names everything that decides a piece's figures.
    """

    @property
    def digests(self) -> Sequence[str]: ...

    @property
    def cost(self) -> float:
        """Estimated time, in any unit: the longest job starts first."""
        ...

    def run(self, on_finished: OnFinished) -> None:
        """Do all pieces and call `on_finished` with each."""
        ...


@dataclass(frozen=True)
class FinishedPieces:
    """Figures of a folder's finished pieces, a JSON file for each digest."""

    folder: Path

    def path(self, digest: str) -> Path:
        """Return the file of a piece, which exists once it is finished."""
        return self.folder / f"{digest}.json"

    def read(self, digest: str) -> dict[str, Any]:
        figures: dict[str, Any] = json.loads(self.path(digest).read_bytes())
        return figures

    def write(self, digest: str, figures: Mapping[str, Any]) -> None:
        """Write the figures atomically, so that an interrupted run leaves no partial file."""
        write_atomic(self.path(digest), json.dumps(figures, allow_nan=False).encode())


def run_jobs(
    jobs: Sequence[ResumableJob], *, folder: Path, workers: int, advance: Callable[[int], None]
) -> None:
    """Run the jobs, the longest first, and keep each piece when it is finished.

    One worker is this process. Ctrl-C ends the others at once and keeps what is finished.
    `advance` is called with the number of pieces that have finished since its last call; of other
    processes, when a whole job has.
    """
    ordered = sorted(jobs, key=lambda job: job.cost, reverse=True)
    finished = FinishedPieces(folder)
    if workers == 1 or len(jobs) <= 1:

        def keep(digest: str, figures: Mapping[str, Any]) -> None:
            finished.write(digest, figures)
            advance(1)

        for job in ordered:
            job.run(keep)
        return
    # Spawned, not forked: this process may have threads (onnxruntime, the progress bar).
    context = multiprocessing.get_context("spawn")
    others = set(multiprocessing.active_children())
    # Ctrl-C, which reaches every process of the terminal, is left to this one.
    ignoring = signal.signal, (signal.SIGINT, signal.SIG_IGN)
    with ProcessPoolExecutor(min(workers, len(jobs)), context, *ignoring) as pool:
        running = {pool.submit(_run_in_worker, job, folder): job for job in ordered}
        try:
            for ended in as_completed(running):
                ended.result()
                advance(len(running[ended].digests))
        except BaseException:
            # Leaving the pool would wait for jobs whose results are no longer needed.
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _run_in_worker(job: ResumableJob, folder: Path) -> None:
    job.run(FinishedPieces(folder).write)
