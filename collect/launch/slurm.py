"""launcher=slurm: a job array, through submitit; each job does a contiguous share of the units.

A job that is killed, preempted or reaches its time limit costs the unit that it was doing: what is
left of its share goes to the next array. The result of each unit is a file, so that finished units
are known before their job ends.
"""

import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from collect.errors import LaunchError
from collect.launch.config import LauncherConfig
from collect.launch.worker import UnitResult, UnitWorker
from predictors.files import write_atomic

POLL_SECONDS = 0.5


def do_share(worker: UnitWorker, units: Sequence[str], folder: str) -> None:
    """Runs in a job: does these units and writes the result of the n-th to FOLDER/n."""
    for number, unit in enumerate(units):
        write_atomic(Path(folder, str(number)), worker.run(unit).encode())


class SlurmEngine:
    """Arrays of at most `launcher.workers` jobs; their logs are in FOLDER/jobs."""

    def __init__(self, config: LauncherConfig, worker: UnitWorker, folder: Path):
        if find_spec("submitit") is None:
            raise LaunchError("launcher=slurm needs submitit: pip install 'moecast[slurm]'")
        import submitit

        self._num_jobs = config.workers
        self._worker = worker
        self._folder = folder.resolve()
        self._folder.mkdir(parents=True, exist_ok=True)
        self.logs = str(self._folder / "jobs")
        self._jobs: list[Any] = []
        parameters: dict[str, Any] = {
            "name": "moecast",
            "timeout_min": 1440,
            "cpus_per_task": config.cpus,
            "gpus_per_node": config.gpus,
        }
        if config.partition is not None:
            parameters["slurm_partition"] = config.partition
        try:
            self._executor = submitit.AutoExecutor(self.logs, cluster=config.cluster)
            self._executor.update_parameters(**parameters | config.options)
        except (RuntimeError, NameError, ValueError) as error:
            raise LaunchError(
                f"launcher=slurm: {' '.join(str(error).split())}. Run this where sbatch is, or try "
                "it on one machine with launcher.cluster=local"
            ) from error

    def run(self, units: Sequence[str]) -> Iterator[UnitResult]:
        num_jobs = min(self._num_jobs, len(units))
        bounds = [len(units) * number // num_jobs for number in range(num_jobs + 1)]
        shares = [units[first:last] for first, last in pairwise(bounds)]
        folders = [tempfile.mkdtemp(prefix="results-", dir=self._folder) for _ in shares]
        workers = [self._worker] * num_jobs
        self._jobs = self._executor.map_array(do_share, workers, shares, folders)
        running = list(zip(self._jobs, shares, map(Path, folders), [0] * num_jobs, strict=True))
        while running:
            still = []
            for job, share, folder, done in running:
                # Asked before the files are read: what a job wrote, it wrote before it ended.
                has_ended = job.done()
                while done < len(share) and (folder / str(done)).exists():
                    yield UnitResult.from_json((folder / str(done)).read_text())
                    done += 1
                if not has_ended:
                    still.append((job, share, folder, done))
                elif done < len(share):
                    error = f"its job {job.job_id} ended ({job.state})"
                    yield UnitResult(unit=share[done], error=error)
            running = still
            if running:
                time.sleep(POLL_SECONDS)

    def close(self) -> None:
        for job in self._jobs:
            if not job.done():
                job.cancel(check=False)
