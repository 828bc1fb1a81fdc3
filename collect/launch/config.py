"""Configuration of `launcher=`: the processes that do the work of `collect` and `train`."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from predictors.errors import MoecastError


class LauncherKind(StrEnum):
    """The engine that runs the workers."""

    LOCAL = "local"
    RAY = "ray"
    SLURM = "slurm"


@dataclass(frozen=True, kw_only=True)
class LauncherConfig:
    kind: LauncherKind = LauncherKind.LOCAL
    """local: processes of this machine; ray: actors; slurm: a job array (submitit)."""
    workers: int = 1
    """Workers, each with its own copy of the model; a single local worker is the command's own
    process."""
    retries: int = 3
    """Retries of a unit that failed or whose worker died."""
    threads: int | None = None
    """CPU threads of each worker; default: the cores of this machine divided by the workers."""
    layers: int = 4
    """train: layers whose networks are trained as one unit."""
    ray_address: str | None = None
    """ray: a running cluster to join (HOST:PORT, or auto), with a token. Default: Ray is started on
    this machine, on loopback."""
    cpus: int = 1
    """ray, slurm: cores that each worker requests."""
    gpus: int = 0
    """GPUs of each worker; local: taken from those that are visible."""
    partition: str | None = None
    """slurm: the partition that the jobs are submitted to."""
    cluster: str | None = None
    """slurm: submitit's executor; `local` runs the jobs on this machine, for a trial."""
    options: dict[str, Any] = field(default_factory=dict)
    """slurm: more parameters of submitit, such as {timeout_min: 600, mem_gb: 64, slurm_account:
    NAME}. A job that reaches its time limit (24 hours by default) is replaced."""

    def __post_init__(self) -> None:
        for name in ("workers", "layers", "cpus"):
            if getattr(self, name) < 1:
                raise MoecastError(f"launcher.{name}={getattr(self, name)}: must be at least 1")
        for name in ("retries", "gpus"):
            if getattr(self, name) < 0:
                raise MoecastError(f"launcher.{name}={getattr(self, name)}: must be 0 or more")
        if self.threads is not None and self.threads < 1:
            raise MoecastError(f"launcher.threads={self.threads}: must be at least 1")
        if self.ray_address is not None and self.kind is not LauncherKind.RAY:
            raise MoecastError(f"launcher.ray_address={self.ray_address} is for launcher=ray")

    @property
    def is_in_process(self) -> bool:
        """True if the command does the work itself, without workers."""
        return self.kind is LauncherKind.LOCAL and self.workers == 1
