"""launcher=local: processes of this machine, spoken to through pipes."""

import os
import queue
import subprocess
import sys
import threading
from pathlib import Path

from collect.launch.task import Kind, Message, Task

GRACE_SECONDS = 5.0
TAIL_BYTES = 600
"""Of a dead worker's log that is shown: the last lines of a traceback."""


class LocalCrew:
    """Each worker is `python -m collect.launch.worker`, its log FOLDER/worker-N.log."""

    def __init__(self, task: Task, folder: Path, *, gpus: int = 0):
        self._task = task
        self._gpus = gpus
        self._folder = folder
        self._processes: dict[int, subprocess.Popen[str]] = {}
        self._events: queue.SimpleQueue[tuple[int, Message]] = queue.SimpleQueue()
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def pids(self) -> dict[int, int]:
        """Worker to process."""
        return {worker: process.pid for worker, process in self._processes.items()}

    def start(self, worker: int) -> None:
        with self._log(worker).open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "collect.launch.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                bufsize=1,
                env=os.environ | self._own_environment(worker),
                # Ctrl-C is for the dispatcher alone, which then ends its workers.
                start_new_session=True,
            )
        self._processes[worker] = process
        threading.Thread(target=self._listen, args=(worker, process), daemon=True).start()
        self._say(worker, self._task.to_json())

    def _own_environment(self, worker: int) -> dict[str, str]:
        own = {
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "OMP_NUM_THREADS": str(self._task.threads),
        }
        if self._gpus:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            first = worker * self._gpus
            every = visible.split(",") if visible else [str(i) for i in range(first + self._gpus)]
            own["CUDA_VISIBLE_DEVICES"] = ",".join(every[first : first + self._gpus])
        return own

    def give(self, worker: int, unit: str) -> None:
        self._say(worker, unit)

    def events(self, timeout_seconds: float) -> list[tuple[int, Message]]:
        try:
            found = [self._events.get(timeout=timeout_seconds)]
        except queue.Empty:
            return []
        while not self._events.empty():
            found.append(self._events.get())
        return found

    def close(self) -> None:
        for process in self._processes.values():
            assert process.stdin is not None
            try:
                process.stdin.close()
            except BrokenPipeError:
                continue
        for process in self._processes.values():
            try:
                process.wait(GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _say(self, worker: int, line: str) -> None:
        stdin = self._processes[worker].stdin
        assert stdin is not None
        try:
            stdin.write(f"{line}\n")
            stdin.flush()
        except BrokenPipeError:
            # It has died: its listener says so.
            return

    def _listen(self, worker: int, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if not line.endswith("\n"):
                # It was killed in the middle of a word.
                break
            message = Message.from_json(line)
            # The process's end is what tells of its death; but not why.
            self._events.put((worker, message))
            if message.kind is Kind.DIED:
                process.wait()
                return
        process.wait()
        self._events.put((worker, Message(Kind.DIED, error=self._why(worker, process.returncode))))

    def _why(self, worker: int, code: int) -> str:
        log = self._log(worker)
        ended = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        last = log.read_bytes()[-TAIL_BYTES:].decode(errors="replace").strip().splitlines()
        said = f" ({last[-1]})" if last and code >= 0 else ""
        return f"worker {worker} {ended}{said}; its log: {log}"

    def _log(self, worker: int) -> Path:
        return self._folder / f"worker-{worker}.log"
