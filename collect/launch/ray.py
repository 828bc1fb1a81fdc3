"""launcher=ray: a pool of Ray actors, on this machine or on the cluster `launcher.ray_address`."""

from collections.abc import Iterator, Sequence

from collect.errors import LaunchError
from collect.launch.config import LauncherConfig
from collect.launch.worker import UnitResult, UnitWorker
from runtime.serving import ray_cluster


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


class RayEngine:
    """Actors; Ray places them, restarts those that die, and tries their unit again."""

    logs = "Ray's session folder"

    def __init__(self, config: LauncherConfig, worker: UnitWorker):
        self._owns_ray = join_ray(config)
        import ray
        from ray.util import ActorPool

        self._ray = ray
        actor = ray.remote(UnitWorker).options(
            num_cpus=config.cpus,
            num_gpus=config.gpus,
            max_restarts=-1,
            max_task_retries=config.retries,
            runtime_env={"env_vars": {"OMP_NUM_THREADS": str(worker.threads)}},
        )
        self._actors = [
            actor.remote(worker.entry, worker.arguments, worker.threads)
            for _ in range(config.workers)
        ]
        for handle in self._actors:
            # All load their models at the same time; an error is reported by the first unit.
            handle.open.remote()
        self._pool = ActorPool(self._actors)

    def run(self, units: Sequence[str]) -> Iterator[UnitResult]:
        for unit in units:
            self._pool.submit(lambda actor, unit: actor.run.remote(unit), unit)
        lost, message = set(units), ""
        while self._pool.has_next():
            try:
                result = UnitResult.from_json(self._pool.get_next_unordered())
            except self._ray.exceptions.RayError as error:
                # Ray has retried it; which unit it was is known when all others have ended.
                message = f"its actor died: {' '.join(str(error).split())[:300]}"
            else:
                lost.discard(result.unit)
                yield result
        for unit in sorted(lost):
            yield UnitResult(unit=unit, error=message, may_retry=False)

    def close(self) -> None:
        for actor in self._actors:
            self._ray.kill(actor)
        if self._owns_ray:
            self._ray.shutdown()
