"""launcher=ray: an actor for each worker, on this machine or on a cluster that was named
(`runtime.ray_cluster`).
"""

import os
import queue
import threading
from typing import Any

from collect.errors import LaunchError
from collect.launch.config import LauncherConfig
from collect.launch.task import Kind, Message, Task
from collect.launch.worker import serve
from runtime import ray_cluster as cluster

PATIENCE_SECONDS = 0.2
"""How long an actor waits for more to say: one call brings many messages."""


class Seat:
    """What runs in an actor: the worker's loop in a thread, and a queue in each direction."""

    def __init__(self, task: str):
        self._units: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._said: queue.SimpleQueue[Message] = queue.SimpleQueue()
        threading.Thread(
            target=serve,
            args=(Task.from_json(task), self._units.get, self._said.put),
            daemon=True,
        ).start()

    def pid(self) -> int:
        return os.getpid()

    def give(self, unit: str) -> None:
        self._units.put(unit)

    def hear(self) -> list[str]:
        """What there is to tell, as JSON; waits a moment for the first of it."""
        try:
            found = [self._said.get(timeout=PATIENCE_SECONDS)]
        except queue.Empty:
            return []
        while not self._said.empty():
            found.append(self._said.get())
        return [message.to_json() for message in found]


def join(config: LauncherConfig, *, num_cpus: int | None = None) -> bool:
    """Starts Ray on this machine, or joins the cluster that was named.

    False when this process has done so before, and will end it by itself. `num_cpus`: unless it is
    the workers' that Ray on this machine is told to have.

    Raises:
        LaunchError: no Ray, no token, or no such cluster.
    """
    try:
        return cluster.join(
            config.address,
            num_cpus=num_cpus or config.workers * config.cpus,
            option="launcher.address",
        )
    except cluster.ClusterError as error:
        raise LaunchError(f"launcher=ray: {error}") from error


class RayCrew:
    """An actor for each worker; Ray schedules them where their resources are free."""

    def __init__(self, task: Task, config: LauncherConfig):
        self._own = join(config)
        import ray

        self._ray = ray
        self._task = task
        self._config = config
        self._actors: dict[int, Any] = {}
        self._heard: dict[Any, int] = {}
        """Reference of each `hear` that is under way to its worker."""

    def pid(self, worker: int) -> int:
        return self._ray.get(self._actors[worker].pid.remote())

    def start(self, worker: int) -> None:
        config = self._config
        options: dict[str, Any] = {
            "num_cpus": config.cpus,
            "num_gpus": config.gpus,
            # The dispatcher replaces it.
            "max_restarts": 0,
            # `hear` waits while `give` comes.
            "max_concurrency": 3,
            "runtime_env": {"env_vars": {"OMP_NUM_THREADS": str(self._task.threads)}},
        }
        if config.memory_gib is not None:
            options["memory"] = config.memory_gib << 30
        actor = self._ray.remote(Seat).options(**options).remote(self._task.to_json())
        self._actors[worker] = actor
        self._listen(worker)

    def give(self, worker: int, unit: str) -> None:
        self._actors[worker].give.remote(unit)

    def events(self, timeout_seconds: float) -> list[tuple[int, Message]]:
        ended, _ = self._ray.wait(list(self._heard), timeout=timeout_seconds)
        found = []
        for reference in ended:
            worker = self._heard.pop(reference)
            try:
                lines = self._ray.get(reference)
            except self._ray.exceptions.RayError as error:
                found.append((worker, Message(Kind.DIED, error=_reason(worker, error))))
                continue
            messages = [Message.from_json(line) for line in lines]
            found += [(worker, message) for message in messages]
            if any(message.kind is Kind.DIED for message in messages):
                self._ray.kill(self._actors[worker])
            else:
                self._listen(worker)
        return found

    def close(self) -> None:
        for actor in self._actors.values():
            self._ray.kill(actor)
        if self._own:
            self._ray.shutdown()

    def _listen(self, worker: int) -> None:
        self._heard[self._actors[worker].hear.remote()] = worker


def _reason(worker: int, error: Exception) -> str:
    said = " ".join(str(error).split())
    return f"worker {worker}'s actor died: {said[:300]}"
