"""launcher=ray: a pool of Ray actors, on this machine or on the cluster `launcher.ray_address`."""

import time
from concurrent.futures import Future
from typing import Any

from collect.config import LauncherConfig
from collect.errors import ClusterLostError, LaunchError
from collect.launch.processes import Say, UnitResult, UnitWorker, WorkerGroup
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


class RayEngine(WorkerGroup):
    """Actors with one unit at a time, which Ray places on the nodes that have room.

    Actors and not tasks: a task would load the model again where it has a GPU. Ray's own restarts
    would keep a unit for the same actor, which waits for ever if the nodes that are left are full.
    """

    logs = "Ray's session folder"
    poll_seconds = ray_cluster.HEAD_POLL_SECONDS

    def __init__(self, config: LauncherConfig, worker: UnitWorker, say: Say):
        self._owns_ray = join_ray(config)
        import ray

        self._ray = ray
        self._watch = ray_cluster.HeadWatch(config.ray_address)
        self._needs = {"CPU": config.cpus} | ({"GPU": config.gpus} if config.gpus else {})
        self._idle_since: float | None = time.monotonic()
        if config.ray_address is None and not ray_cluster.fits_a_node(self._needs):
            if self._owns_ray:
                ray.shutdown()
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
        super().__init__(config, say)

    def start(self, number: int) -> "RayProcess":  # noqa: ARG002
        return RayProcess(self._actor.remote(*self._arguments))

    def has_died(self, error: BaseException | None) -> bool:
        from ray.exceptions import RayError, RayTaskError

        # An exception of the work itself is no death.
        return isinstance(error, RayError) and not isinstance(error, RayTaskError)

    def on_poll(self) -> None:
        """Raises LaunchError if the head is lost; says once what workers wait for that wait."""
        check_head(self._watch)
        if self._idle_since is None or time.monotonic() - self._idle_since < PENDING_SECONDS:
            return
        self._idle_since = None
        # Without its head, Ray ends this process when it is asked for the nodes.
        check_head(self._watch, at_once=True)
        if not any(worker.created.done() for worker in self.workers.values()):
            self.say(
                "no worker has started yet: each needs "
                f"{ray_cluster.describe_resources(self._needs)}; the cluster's nodes have "
                f"{ray_cluster.describe_nodes()}"
            )

    def on_death(self) -> None:
        # A new head knows no actor of this command: that is no failure of a unit.
        check_head(self._watch, at_once=True)

    def close(self) -> None:
        super().close()
        if self._owns_ray:
            self._ray.shutdown()


class RayProcess:
    """An actor."""

    def __init__(self, actor: Any):
        self._actor = actor
        self.created = actor.__ray_ready__.remote().future()
        """Ends when it has a process."""
        self.opened = actor.open.remote().future()

    def submit(self, unit: str) -> Future[UnitResult]:
        return self._actor.run.remote(unit).future()

    def close(self) -> None:
        import ray

        ray.kill(self._actor)
