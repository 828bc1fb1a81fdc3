"""Starts the workers of a recording: one pool, three engines."""

import os
from pathlib import Path
from typing import Any

from collect.config import LauncherConfig, LauncherKind
from collect.launch.processes import LocalEngine, Say, UnitWorker, WorkerPool


def start_pool(
    config: LauncherConfig,
    entry: str,
    arguments: dict[str, Any],
    *,
    logs: Path,
    name: str = "work",
    say: Say = lambda _: None,
) -> WorkerPool:
    """Starts the workers of `entry`, as `collect.launch.processes` describes it.

    `name` is part of the names of a cluster's jobs. For `say`, see `WorkerPool`.

    Raises:
        LaunchError: the engine is not installed or cannot be reached.
    """
    worker = UnitWorker(entry, arguments, threads_per_worker(config))
    if config.kind is LauncherKind.RAY:
        from collect.launch.ray import RayEngine

        return RayEngine(config, worker, say)
    if config.kind is LauncherKind.SLURM:
        from collect.launch.slurm import SlurmEngine

        return SlurmEngine(config, worker, logs, say, name=name)
    return LocalEngine(config, worker, logs, say)


def threads_per_worker(config: LauncherConfig) -> int:
    """`launcher.threads`, or an even share of this machine, or the cores that a worker asks for."""
    if config.threads is not None:
        return config.threads
    if config.kind is LauncherKind.LOCAL:
        return max(1, (os.cpu_count() or 1) // config.workers)
    return config.cpus
