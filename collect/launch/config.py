"""What `launcher=` can be told."""

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from predictors.errors import MoecastError


class LauncherKind(StrEnum):
    """What runs the workers."""

    LOCAL = "local"
    RAY = "ray"
    SLURM = "slurm"


@dataclass(kw_only=True)
class LauncherConfig:
    kind: LauncherKind = LauncherKind.LOCAL
    """local: processes of this machine; ray: actors; slurm: jobs (submitit). What is made is the
    same, with the same number of threads."""
    workers: int = 1
    """Workers, each with a model of its own; local with one is this very process."""
    retries: int = 3
    """Times that a unit is tried again when it failed or its worker died, before it is given up."""
    threads: int | None = None
    """CPU threads of a worker; unless given, those of this machine divided by the workers."""
    layers: int = 4
    """train: layers whose networks make one task."""
    address: str | None = None
    """ray: a running cluster to join (HOST:PORT, or auto), with token authentication; without one,
    Ray is started on this machine, on loopback, and ended afterwards."""
    cpus: int = 1
    """ray, slurm: cores that a worker asks for."""
    gpus: int = 0
    """GPUs of each worker; local: that many of those that are visible here."""
    memory_gib: int | None = None
    """ray, slurm: memory that a worker asks for."""
    minutes: int = 1440
    """slurm: time limit of a worker's job; one that reaches it is replaced."""
    partition: str | None = None
    """slurm: where jobs are queued."""
    cluster: str | None = None
    """slurm: submitit's executor; `local` runs the jobs on this machine, to try it."""
    folder: Path | None = None
    """slurm: a folder that this machine and the nodes share, for messages and logs; default:
    RUN_DIR/workers."""
    options: dict[str, Any] = field(default_factory=dict)
    """slurm: more of submitit's parameters, such as {slurm_account: NAME}."""

    def __post_init__(self) -> None:
        for name in ("workers", "layers", "cpus", "minutes"):
            if getattr(self, name) < 1:
                raise MoecastError(f"launcher.{name}={getattr(self, name)}: must be at least 1")
        for name in ("retries", "gpus"):
            if getattr(self, name) < 0:
                raise MoecastError(f"launcher.{name}={getattr(self, name)}: must be 0 or more")
        for name in ("threads", "memory_gib"):
            if (getattr(self, name) or 1) < 1:
                raise MoecastError(f"launcher.{name}={getattr(self, name)}: must be at least 1")
        if self.address is not None and self.kind is not LauncherKind.RAY:
            raise MoecastError(f"launcher.address={self.address} is for launcher=ray")

    @property
    def is_this_process(self) -> bool:
        return self.kind is LauncherKind.LOCAL and self.workers == 1


SCHEMAS: dict[str, type] = {"launcher/base": LauncherConfig}
