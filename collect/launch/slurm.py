"""launcher=slurm: a job array, through submitit; each job does a contiguous share of the units.

A job that is killed, preempted or reaches its time limit costs the unit that it was doing: what is
left of its share goes to the next array. The result of each unit is a file, so that finished units
are known before their job ends, and to a job that Slurm starts again. submitit's own results and
states would need the end of a job, and Slurm's accounting: the states come from `squeue`, as many
clusters keep no accounting.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from collect.config import LauncherConfig
from collect.errors import LaunchError
from collect.launch.processes import Say, UnitResult, UnitWorker, WorkerPool
from predictors.files import write_atomic

POLL_SECONDS = 0.5
CONTROLLER_PATIENCE_SECONDS = 600.0
"""A controller that is restarted refuses jobs for as long as it takes."""
CONTROLLER_PAUSE_SECONDS = 5.0
NO_CONTROLLER = "Unable to contact slurm controller"
FIRST_SECONDS, LAST_SECONDS = 2.0, 30.0
"""Between two questions to the controller: it serves all users of the cluster."""
COMMAND_SECONDS = 120.0
FIELD_WIDTH = 200
"""Squeue cuts what is longer."""
FIELDS = ("JobArrayID", "State", "exit_code", "NodeList", "Reason")
ENDED = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY"),
    *("PREEMPTED", "REVOKED", "TIMEOUT"),
}
"""Final states. A job in any other state, such as REQUEUED or SUSPENDED, may still run."""
USUAL_REASONS = {
    *("None", "Priority", "Resources", "BeginTime", "Cleaning", "JobArrayTaskLimit", "Dependency")
}
"""Why a job waits when it needs nobody's help."""
OF_THE_CLUSTER = {"SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT"}
"""Variables that do not describe a job."""


def do_share(worker: UnitWorker, units: Sequence[str], folder: str) -> None:
    """Runs in a job: does these units and writes the result of the n-th to FOLDER/n.

    Slurm sends SIGUSR2 some time before the time limit (`signal_delay_s`): the unit that is being
    done may end, no other is begun. SIGTERM, with which scancel begins, ends the job at once.
    """
    is_stopping = False

    def stop(*_: object) -> None:
        nonlocal is_stopping
        is_stopping = True
        log("the time limit is near: no other unit begins")

    # In place of submitit's handlers: one raises an error in the unit, the other does nothing.
    signal.signal(signal.SIGUSR2, stop)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for number, unit in enumerate(units):
        path = Path(folder, str(number))
        if path.exists():
            continue
        if is_stopping:
            return
        log(f"{unit}: begins")
        write_atomic(path, json.dumps(asdict(worker.run(unit))).encode())
        log(f"{unit}: ended")


def log(line: str) -> None:
    """Writes to the job's log, in one call: a signal handler may interrupt another's."""
    os.write(sys.stdout.fileno(), f"moecast: {line}\n".encode())


class SlurmEngine(WorkerPool):
    """Arrays of at most `launcher.workers` jobs; their logs are in FOLDER/jobs."""

    def __init__(
        self, config: LauncherConfig, worker: UnitWorker, folder: Path, say: Say, *, name: str
    ):
        super().__init__(config, say)
        if find_spec("submitit") is None:
            raise LaunchError("launcher=slurm needs submitit: pip install 'moecast[slurm]'")
        import submitit

        self._worker = worker
        self._folder = folder.resolve()
        self._folder.mkdir(parents=True, exist_ok=True)
        self.logs = str(self._folder / "jobs")
        self._jobs: list[Any] = []
        """Jobs of the running array."""
        self._states: SlurmStates | None = None
        """None for jobs that are processes of this machine."""
        self._name = f"moecast-{name}"
        parameters = {"name": self._name, "timeout_min": 1440, "cpus_per_task": config.cpus}
        if config.gpus:
            parameters["gpus_per_node"] = config.gpus
        if config.partition is not None:
            parameters["slurm_partition"] = config.partition
        parameters |= config.options
        # From version 22.05 on, srun does not take it from its job.
        same_cores = [f"--cpus-per-task={parameters['cpus_per_task']}"]
        parameters.setdefault("slurm_srun_args", same_cores)
        try:
            # Without a name submitit takes its local executor where there is no Slurm.
            self._executor = submitit.AutoExecutor(self.logs, cluster=config.cluster or "slurm")
            self._executor.update_parameters(**parameters)
        except (RuntimeError, NameError, ValueError, AssertionError) as error:
            raise LaunchError(
                f"launcher=slurm: {one_line(str(error))}. Run this where sbatch is, or try "
                "it on one machine with launcher.cluster=local"
            ) from error

    def attempt(self, units: Sequence[str]) -> Iterator[UnitResult]:
        num_jobs = min(self.config.workers, len(units))
        bounds = [len(units) * number // num_jobs for number in range(num_jobs + 1)]
        shares = [units[first:last] for first, last in pairwise(bounds)]
        folders = [tempfile.mkdtemp(prefix="results-", dir=self._folder) for _ in shares]
        self._jobs = self._submit(shares, folders)
        if self._executor.cluster == "slurm":
            job_ids = [job.job_id for job in self._jobs]
            self._states = SlurmStates(job_ids, self.say)
            self.say(
                f"Slurm {job_ids[0].partition('_')[0]}: {len(job_ids)} "
                f"job{'s' * (len(job_ids) > 1)} named {self._name}; logs: {self.logs}"
            )
        left = {
            job: deque((unit, Path(folder, str(number))) for number, unit in enumerate(share))
            for job, share, folder in zip(self._jobs, shares, folders, strict=True)
        }
        while left:
            # Asked before the files are read: what a job wrote, it wrote before it ended.
            ended = self._read_ended()
            for job, waiting in list(left.items()):
                has_returned, log_file = is_over(job), f"log: {job.paths.stderr}"
                while waiting and waiting[0][1].exists():
                    _, path = waiting.popleft()
                    result = UnitResult(**json.loads(path.read_text()))
                    if result.error and not result.is_fatal:
                        error = f"{result.error} (job {job.job_id}, {log_file})"
                        result = replace(result, error=error)
                    yield result
                if job.job_id in ended or has_returned:
                    del left[job]
                    # One that returned before its share was done has stopped in time.
                    if waiting and not has_returned:
                        error = f"its job {job.job_id} ended ({ended[job.job_id]}), {log_file}"
                        yield UnitResult(unit=waiting[0][0], error=error)
            if left:
                time.sleep(POLL_SECONDS)
        self._jobs = []

    def close(self) -> None:
        ended = self._read_ended() if self._jobs else {}
        alive = [job for job in self._jobs if job.job_id not in ended and not is_over(job)]
        if self._states is None:
            for job in alive:
                job.cancel(check=False)
        elif alive:
            self._states.cancel([job.job_id for job in alive])

    def _read_ended(self) -> dict[str, str]:
        """Returns how each job ended that has ended, by its id."""
        if self._states is not None:
            return self._states.read_ended()
        return {job.job_id: job.state for job in self._jobs if job.done()}

    def _submit(self, shares: Sequence[Sequence[str]], folders: Sequence[str]) -> list[Any]:
        """Submits an array; waits for a controller that is being restarted."""
        from submitit.core.utils import FailedJobError, FailedSubmissionError

        deadline = time.monotonic() + CONTROLLER_PATIENCE_SECONDS
        has_said = False
        while True:
            try:
                with outside_jobs():
                    return self._executor.map_array(
                        do_share, [self._worker] * len(shares), shares, folders
                    )
            except (FailedJobError, FailedSubmissionError) as error:
                said = one_line(str(error))
                if NO_CONTROLLER not in said or time.monotonic() > deadline:
                    raise LaunchError(
                        f"sbatch refuses the jobs: {said}. launcher.partition= and "
                        "launcher.options= say what they ask for"
                    ) from error
                if not has_said:
                    self.say(f"waiting for Slurm's controller: {said}")
                has_said = True
                time.sleep(CONTROLLER_PAUSE_SECONDS)


def is_over(job: Any) -> bool:
    """Returns whether `do_share` has returned: submitit's file is looked for, never read."""
    return job.paths.result_pickle.exists()


class SlurmStates:
    """Asks squeue at growing intervals; while the controller does not answer, nothing changes."""

    def __init__(self, job_ids: Sequence[str], say: Say):
        self._job_ids = list(job_ids)
        self._array = job_ids[0].partition("_")[0]
        self._say = say
        self._started = time.monotonic()
        self._next = self._started + FIRST_SECONDS
        self._ended: dict[str, str] = {}
        self._reasons: set[str] = set()
        self._is_silent = False

    def read_ended(self) -> dict[str, str]:
        """Returns how each job ended that has ended, by its id."""
        now = time.monotonic()
        if now >= self._next:
            self._ask()
            pause = (time.monotonic() - self._started) / 4
            self._next = time.monotonic() + min(max(pause, FIRST_SECONDS), LAST_SECONDS)
        return self._ended

    def cancel(self, job_ids: Sequence[str]) -> None:
        done = run_slurm("scancel", *job_ids)
        if done.returncode != 0:
            self._say(
                f"scancel {' '.join(job_ids)} failed: {one_line(done.stderr)}. Repeat it, or the "
                "jobs finish their share"
            )

    def _ask(self) -> None:
        form = ",".join(f"{field}:{FIELD_WIDTH}|" for field in FIELDS)
        done = run_slurm("squeue", "-h", "-r", "-t", "all", "-j", self._array, "-O", form)
        # The controller forgets jobs some minutes after their end (MinJobAge).
        is_forgotten = "Invalid job id" in done.stderr
        if done.returncode != 0 and not is_forgotten:
            if not self._is_silent:
                self._say(f"squeue failed, jobs go on without it: {one_line(done.stderr)}")
            self._is_silent = True
            return
        self._is_silent = False
        found = {}
        for line in [] if is_forgotten else done.stdout.splitlines():
            job_id, *fields = map(str.strip, line.split("|")[: len(FIELDS)])
            found[job_id] = fields
        for job_id in self._job_ids:
            if job_id not in found:
                self._ended.setdefault(job_id, "Slurm no longer knows how")
                continue
            state, exit_code, node, reason = found[job_id]
            if state in ENDED:
                self._ended[job_id] = describe_end(state, exit_code, node)
            elif state == "PENDING" and reason not in USUAL_REASONS | self._reasons:
                self._reasons.add(reason)
                self._say(
                    f"Slurm job {job_id} waits: {reason}; scontrol show job {job_id} says more"
                )


def describe_end(state: str, exit_code: str, node: str) -> str:
    """Returns how a job ended; `state` is Slurm's word, such as FAILED."""
    if exit_code.isdigit():
        # Older versions print the status as wait(2) returns it.
        status = int(exit_code)
        exit_code = f"{status >> 8}:{status & 127}"
    return f"{state}, exit code {exit_code}{f' on {node}' if node else ''}"


def run_slurm(*command: str) -> subprocess.CompletedProcess[str]:
    """Runs one of Slurm's commands; one that hangs counts as failed."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        said = f"{command[0]} did not answer within {COMMAND_SECONDS:.0f} s"
        return subprocess.CompletedProcess(command, 1, "", said)


def one_line(text: str) -> str:
    return " ".join(text.split())


@contextmanager
def outside_jobs() -> Iterator[None]:
    """Hides the job in which this process runs, if it does.

    A job inherits variables of the one that submits it, and srun takes them for its options: with
    SLURM_NTASKS=2 it would start a share twice.
    """
    hidden = {
        name: value
        for name, value in os.environ.items()
        if "SLURM_JOB_ID" in os.environ
        and name.startswith(("SLURM_", "SLURMD_", "SRUN_"))
        and name not in OF_THE_CLUSTER
    }
    for name in hidden:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(hidden)
