"""Hands units to an engine's workers and retries those that fail."""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from collect.config import LauncherConfig, LauncherKind
from collect.errors import LaunchError
from collect.launch.processes import UnitResult, UnitWorker


class WorkerEngine(Protocol):
    """Workers of one kind: local processes, Ray actors, or jobs of a cluster."""

    logs: str
    """The place of their output, for error messages."""

    def run(self, units: Sequence[str]) -> Iterator[UnitResult]:
        """Tries each unit once and yields results as they come.

        A unit that no worker began, since one of them died, has no result.
        """
        ...

    def close(self) -> None:
        """Ends every worker, whatever it is doing."""
        ...


class WorkerPool:
    """Workers that keep what they have loaded until the `with` block ends."""

    def __init__(
        self,
        config: LauncherConfig,
        entry: str,
        arguments: dict[str, Any],
        *,
        logs: Path,
        name: str = "work",
        say: Callable[[str], object] = lambda _: None,
    ):
        """Starts the workers of `entry`, as `collect.launch.processes` describes it.

        `name` is part of the names of a cluster's jobs. `say` is called with a line for each
        attempt that failed, for what happens to jobs, and for workers that cannot start.

        Raises:
            LaunchError: the engine is not installed or cannot be reached.
        """
        self._retries = config.retries
        self._say = say
        self._engine = start_engine(config, entry, arguments, logs, name, say)
        self.counts = {"units": 0, "retried": 0}
        """Of the last `run`."""

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.close()

    def run(
        self, units: Sequence[str], *, advance: Callable[[str], object] = lambda _: None
    ) -> dict[str, Any]:
        """Returns the value of each unit; `advance` is called with each unit that is done.

        Raises:
            LaunchError: an error of the user at once; otherwise, when all other units are done, the
                units that failed more than `retries` times.
        """
        self.counts = {"units": len(units), "retried": 0}
        values: dict[str, Any] = {}
        errors: dict[str, str] = {}
        tries: Counter[str] = Counter()
        waiting = list(units)
        vain_rounds = 0
        # One more than a unit's tries: what stands behind it in a job's share has its turn, too.
        while waiting and vain_rounds <= self._retries + 1:
            vain_rounds += 1
            for result in self._engine.run(waiting):
                unit = result.unit
                if result.is_fatal:
                    raise LaunchError(result.error)
                if not result.error:
                    values[unit] = result.value
                    vain_rounds = 0
                    advance(unit)
                    continue
                errors[unit] = result.error
                tries[unit] += 1
                is_last = tries[unit] > self._retries
                self.counts["retried"] += not is_last
                then = "given up" if is_last else "tried again"
                self._say(f"{unit[:12]} is {then}: {result.error}; logs: {self._engine.logs}")
            waiting = [u for u in waiting if u not in values and tries[u] <= self._retries]
        failed = [unit for unit in units if unit not in values]
        if failed:
            unit = next((unit for unit in failed if unit in errors), failed[0])
            raise LaunchError(
                f"{len(failed)} of {len(units)} units failed, the others are done. {unit}: "
                f"{errors.get(unit, 'no worker came to it')}; logs: {self._engine.logs}. Run the "
                "same command again: it does only what is missing"
            )
        return values


def start_engine(
    config: LauncherConfig,
    entry: str,
    arguments: dict[str, Any],
    logs: Path,
    name: str,
    say: Callable[[str], object],
) -> WorkerEngine:
    worker = UnitWorker(entry, json.dumps(arguments), threads_per_worker(config))
    if config.kind is LauncherKind.RAY:
        from collect.launch.ray import RayEngine

        return RayEngine(config, worker, say)
    if config.kind is LauncherKind.SLURM:
        from collect.launch.slurm import SlurmEngine

        return SlurmEngine(config, worker, logs, name=name, say=say)
    from collect.launch.processes import LocalEngine

    return LocalEngine(config, worker, logs)


def threads_per_worker(config: LauncherConfig) -> int:
    """`launcher.threads`, or an even share of this machine, or the cores that a worker asks for."""
    if config.threads is not None:
        return config.threads
    if config.kind is LauncherKind.LOCAL:
        return max(1, (os.cpu_count() or 1) // config.workers)
    return config.cpus
