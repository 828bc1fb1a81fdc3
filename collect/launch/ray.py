"""launcher=ray: a pool of Ray actors, on this machine or on the cluster `launcher.ray_address`."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from collect.errors import ClusterLostError, LaunchError
from collect.launch.config import LauncherConfig
from collect.launch.worker import UnitResult, UnitWorker
from runtime.serving import ray_cluster

PENDING_SECONDS = 20.0
"""Without any worker for this time, a line says what the workers wait for."""


def join_ray(config: LauncherConfig, *, num_cpus: int | None = None) -> bool:
    """Starts Ray on this machine with `num_cpus` cores, or joins the cluster that was named.

    Returns False if this process has done so before and will leave it later.

    Raises:
        LaunchError: no Ray, no token, or no such cluster.
    """
    try:
        return ray_cluster.join(
            config.ray_address,
            num_cpus=num_cpus or config.workers * config.cpus,
            option="launcher.ray_address",
        )
    except ray_cluster.ClusterError as error:
        raise LaunchError(f"launcher=ray: {error}") from error


def check_head(watch: ray_cluster.HeadWatch, *, at_once: bool = False) -> bool:
    """Asks the cluster's head whether it is there, unless that was done a moment ago.

    Returns whether it has answered the last time.

    Raises:
        ClusterLostError: it is lost.
    """
    try:
        return watch.check(at_once=at_once)
    except ray_cluster.HeadLost as error:
        raise ClusterLostError(
            f"launcher=ray: {error}. Start the cluster again (on each node ray stop --force, "
            "then ray start), then run the same command: it does only what is missing"
        ) from error


class RayEngine:
    """Actors with one unit at a time, which Ray places on the nodes that have room.

    An actor whose node or process has died is replaced by a new one. Ray's own restarts would keep
    the unit for the same actor, which waits for ever if the nodes that are left are full.
    """

    logs = "Ray's session folder"

    def __init__(self, config: LauncherConfig, worker: UnitWorker, say: Callable[[str], object]):
        self._owns_ray = join_ray(config)
        import ray

        self._ray = ray
        self._say = say
        self._watch = ray_cluster.HeadWatch(config.ray_address)
        self._loading: dict[Any, Any] = {}
        """Actors that load their models, or wait for a node, by the call that ends then."""
        self._created: dict[Any, Any] = {}
        """Of each of these calls, one that ends when the actor has a process."""
        self._idle: list[Any] = []
        self._running: dict[Any, tuple[Any, str]] = {}
        self._needs = {"CPU": config.cpus} | ({"GPU": config.gpus} if config.gpus else {})
        if config.ray_address is None and not ray_cluster.fits_a_node(self._needs):
            self.close()
            raise LaunchError(
                f"launcher=ray: each worker needs {ray_cluster.describe_resources(self._needs)}; "
                "this machine has fewer. Join a cluster with launcher.ray_address, or ask for fewer"
            )
        self._actor = ray.remote(UnitWorker).options(
            num_cpus=config.cpus,
            num_gpus=config.gpus,
            runtime_env={"env_vars": {"OMP_NUM_THREADS": str(worker.threads)}},
        )
        self._arguments = worker.entry, worker.arguments, worker.threads
        for _ in range(config.workers):
            self._start_actor()

    def run(self, units: Sequence[str]) -> Iterator[UnitResult]:
        waiting = deque(units)
        while waiting or self._running:
            while waiting and self._idle:
                actor, first = self._idle.pop(), waiting.popleft()
                self._running[actor.run.remote(first)] = actor, first
            call = self._wait_for_call()
            unit: str | None
            if call in self._loading:
                actor, unit = self._loading.pop(call), None
                del self._created[call]
            else:
                actor, unit = self._running.pop(call)
            try:
                text = self._ray.get(call)
            except self._ray.exceptions.RayError as error:
                if unit is None and isinstance(error, self._ray.exceptions.RayTaskError):
                    # The work cannot be opened: the actor reports it with its first unit.
                    self._idle.append(actor)
                    continue
                # A new head knows no actor of this command: that is no failure of a unit.
                check_head(self._watch, at_once=True)
                self._ray.kill(actor)
                self._start_actor()
                if unit is None and waiting:
                    # It counts as a try of a unit, so that actors that cannot start are given up.
                    unit = waiting.popleft()
                if unit is not None:
                    message = f"its actor died: {' '.join(str(error).split())[:300]}"
                    yield UnitResult(unit=unit, error=message)
                continue
            self._idle.append(actor)
            if unit is not None:
                yield UnitResult.from_json(text)

    def _wait_for_call(self) -> Any:
        """Returns a call of `_loading` or `_running` that has ended.

        Raises:
            LaunchError: the head of the cluster is lost.
        """
        calls = [*self._running, *self._loading]
        started, is_pending = time.monotonic(), not self._running
        while True:
            check_head(self._watch)
            ended, _ = self._ray.wait(calls, timeout=ray_cluster.HEAD_POLL_SECONDS)
            if ended:
                return ended[0]
            if is_pending and time.monotonic() - started > PENDING_SECONDS:
                is_pending = False
                # Without its head, Ray ends this process when it is asked for the nodes.
                check_head(self._watch, at_once=True)
                created, _ = self._ray.wait([self._created[call] for call in calls], timeout=0)
                if not created:
                    self._say(
                        "no worker has started yet: each needs "
                        f"{ray_cluster.describe_resources(self._needs)}; the cluster's nodes have "
                        f"{ray_cluster.describe_nodes()}"
                    )

    def _start_actor(self) -> None:
        actor = self._actor.remote(*self._arguments)
        created = actor.__ray_ready__.remote()
        # All load their models at the same time.
        call = actor.open.remote()
        self._loading[call], self._created[call] = actor, created

    def close(self) -> None:
        running = [actor for actor, _ in self._running.values()]
        for actor in (*self._loading.values(), *self._idle, *running):
            self._ray.kill(actor)
        if self._owns_ray:
            self._ray.shutdown()
