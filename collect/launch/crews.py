"""From `launcher=` to a dispatcher with its crew; an engine is imported only when asked for."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from collect.launch.config import LauncherConfig, LauncherKind
from collect.launch.dispatch import Dispatcher
from collect.launch.task import Crew, Task


def dispatcher_for(
    config: LauncherConfig,
    entry: str,
    arguments: dict[str, Any],
    *,
    folder: Path,
    tell: Callable[[str], object] | None = None,
) -> Dispatcher:
    """Workers that open `entry` with these arguments (JSON values).

    Their logs go to `folder`, and `tell` is called with a line when one is replaced or a unit tried
    again.

    Raises:
        LaunchError: the engine is not installed, or not there.
    """
    task = Task(entry, arguments, threads=threads_of(config))
    crew = crew_for(config, task, folder)
    return Dispatcher(crew, workers=config.workers, retries=config.retries, tell=tell)


def crew_for(config: LauncherConfig, task: Task, folder: Path) -> Crew:
    if config.kind is LauncherKind.RAY:
        from collect.launch.ray import RayCrew

        return RayCrew(task, config)
    if config.kind is LauncherKind.SLURM:
        from collect.launch.slurm import SlurmCrew

        return SlurmCrew(task, config, config.folder or folder)
    from collect.launch.local import LocalCrew

    return LocalCrew(task, folder, gpus=config.gpus)


def threads_of(config: LauncherConfig) -> int:
    """Of each worker."""
    if config.threads is not None:
        return config.threads
    if config.kind is LauncherKind.LOCAL:
        return max(1, (os.cpu_count() or 1) // config.workers)
    return config.cpus
