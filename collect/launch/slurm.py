"""launcher=slurm: a job for each worker, through submitit; units and answers go through files.

Jobs begin when the queue lets them: those that run work, the others join. A job that reaches its
time limit, is preempted or killed is submitted again, and its unit is done by whoever is free.
"""

import os
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from collect.errors import LaunchError
from collect.launch.config import LauncherConfig
from collect.launch.mailbox import POLL_SECONDS, Beat, Mailbox, Pulse
from collect.launch.task import Kind, Message, Task
from collect.launch.worker import serve

TASK, TO_WORKER, FROM_WORKER = "task.json", "to-worker", "from-worker"
END = ""
"""In place of a unit: there is no more to do."""

GRACE_SECONDS = 5.0
"""Between this word and the job's cancellation."""


def attend(folder: str) -> None:
    """What runs in a job."""
    box = Path(folder)
    inbox, outbox = Mailbox(box / TO_WORKER), Mailbox(box / FROM_WORKER)
    pulse = Pulse(box.parent)
    task = Task.from_json((box / TASK).read_text())

    def watch() -> None:
        watched = Pulse(box.parent)
        while watched.is_felt():
            time.sleep(POLL_SECONDS)
        # In the middle of a unit that nobody waits for; what is not committed is made again.
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    serve(
        task,
        lambda: inbox.wait(pulse) or None,
        lambda message: outbox.write(message.to_json()),
    )
    # Whatever threads the model has: the answers are written, and nobody reads the job's result.
    os._exit(0)


class SlurmCrew:
    """Each worker is a job with a folder of its own, FOLDER/worker-N-M for its M-th job."""

    def __init__(self, task: Task, config: LauncherConfig, folder: Path):
        if find_spec("submitit") is None:
            raise LaunchError("launcher=slurm needs submitit: pip install 'moecast[slurm]'")
        import submitit

        self._task = task
        self._folder = _new_folder(folder.resolve())
        try:
            self._executor = submitit.AutoExecutor(self._folder / "jobs", cluster=config.cluster)
            self._executor.update_parameters(name="moecast", **_parameters(config))
        except (RuntimeError, NameError, ValueError) as error:
            raise LaunchError(
                f"launcher=slurm: {' '.join(str(error).split())}. Run this where sbatch is, or try "
                "it on one machine with launcher.cluster=local"
            ) from error
        self._beat = Beat(self._folder)
        self._jobs: dict[int, Any] = {}
        self._boxes: dict[int, tuple[Mailbox, Mailbox]] = {}
        self._started: dict[int, int] = {}
        self._checked: dict[int, float] = {}

    def start(self, worker: int) -> None:
        number = self._started[worker] = self._started.get(worker, -1) + 1
        box = self._folder / f"worker-{worker}-{number}"
        self._boxes[worker] = Mailbox(box / TO_WORKER), Mailbox(box / FROM_WORKER)
        (box / TASK).write_text(self._task.to_json())
        self._beat.tell()
        self._jobs[worker] = self._executor.submit(attend, str(box))

    def give(self, worker: int, unit: str) -> None:
        self._boxes[worker][0].write(unit)

    def events(self, timeout_seconds: float) -> list[tuple[int, Message]]:
        deadline = time.monotonic() + timeout_seconds
        while not (found := self._news()) and time.monotonic() < deadline:
            time.sleep(min(POLL_SECONDS, timeout_seconds))
        return found

    def close(self) -> None:
        for worker in self._jobs:
            self._boxes[worker][0].write(END)
        deadline = time.monotonic() + GRACE_SECONDS
        for job in self._jobs.values():
            while not job.done() and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
            if not job.done():
                job.cancel(check=False)

    def _news(self) -> list[tuple[int, Message]]:
        self._beat.tell()
        found = []
        for worker, job in list(self._jobs.items()):
            # Asked before its messages are read: whatever it said, it said before it ended.
            ended = job.done()
            said = [Message.from_json(text) for text in self._boxes[worker][1].read()]
            found += [(worker, message) for message in said]
            told = any(message.kind is Kind.DIED for message in said)
            if ended or told:
                del self._jobs[worker]
            if ended and not told:
                why = f"worker {worker}'s job {job.job_id} ended ({job.state}); its logs: "
                found.append((worker, Message(Kind.DIED, error=f"{why}{job.paths.stderr}")))
        return found


def _parameters(config: LauncherConfig) -> dict[str, Any]:
    """Submitit's words for what was asked."""
    found: dict[str, Any] = {
        "timeout_min": config.minutes,
        "cpus_per_task": config.cpus,
        "gpus_per_node": config.gpus,
    }
    if config.memory_gib is not None:
        found["mem_gb"] = config.memory_gib
    if config.partition is not None:
        found["slurm_partition"] = config.partition
    return found | config.options


def _new_folder(folder: Path) -> Path:
    """FOLDER/0, FOLDER/1, ...: what an earlier run left is not read as news."""
    number = 0
    while True:
        try:
            (folder / str(number)).mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            return folder / str(number)
