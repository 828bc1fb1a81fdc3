"""The states of a job array, as Slurm's controller knows them.

`squeue` is asked, not `sacct`: many clusters keep no accounting.
"""

import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

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
    *("None", "Priority", "Resources", "BeginTime", "Cleaning", "JobArrayTaskLimit", "Dependency"),
}
"""Why a job waits when it needs nobody's help."""
OF_THE_CLUSTER = {"SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT"}
"""Variables that do not describe a job."""


@dataclass(frozen=True)
class SlurmJobState:
    """A line of squeue."""

    job_id: str
    state: str
    """Slurm's word, such as RUNNING."""
    exit_code: str
    node: str
    reason: str

    @classmethod
    def parse(cls, line: str) -> "SlurmJobState":
        job_id, state, exit_code, node, reason = map(str.strip, line.split("|")[: len(FIELDS)])
        if exit_code.isdigit():
            # Older versions print the status as wait(2) returns it.
            status = int(exit_code)
            exit_code = f"{status >> 8}:{status & 127}"
        return cls(job_id, state, exit_code, node, reason)

    def describe(self) -> str:
        where = f" on {self.node}" if self.node else ""
        return f"{self.state}, exit code {self.exit_code}{where}"


class SlurmStates:
    """Asks squeue at growing intervals; while the controller does not answer, nothing changes."""

    def __init__(self, job_ids: Sequence[str], say: Callable[[str], object]):
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
        states = {}
        for line in [] if is_forgotten else done.stdout.splitlines():
            state = SlurmJobState.parse(line)
            states[state.job_id] = state
        for job_id in self._job_ids:
            found = states.get(job_id)
            if found is None:
                self._ended.setdefault(job_id, "Slurm no longer knows how")
            elif found.state in ENDED:
                self._ended[job_id] = found.describe()
            elif found.state == "PENDING":
                self._report(found)

    def _report(self, waiting: SlurmJobState) -> None:
        if waiting.reason not in USUAL_REASONS | self._reasons:
            self._reasons.add(waiting.reason)
            self._say(
                f"Slurm job {waiting.job_id} waits: {waiting.reason}; scontrol show job "
                f"{waiting.job_id} says more"
            )


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
