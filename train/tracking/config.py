"""Options of experiment tracking."""

from dataclasses import dataclass, field
from enum import StrEnum


class LoggerKind(StrEnum):
    """Destination of a run's curves and figures."""

    CSV = "csv"
    TENSORBOARD = "tensorboard"
    MLFLOW = "mlflow"
    WANDB = "wandb"


@dataclass(frozen=True, kw_only=True)
class WandbConfig:
    """Fields of a run in Weights & Biases; those not given are left to wandb's own settings."""

    project: str | None = None
    """Project; default: WANDB_PROJECT, else moecast."""
    entity: str | None = None
    """User or team; default: WANDB_ENTITY, else that of the login."""
    name: str | None = None
    """Name of the run; default: WANDB_NAME, else that of the run folder."""
    group: str | None = None
    """Group of runs; default: WANDB_RUN_GROUP."""
    job_type: str | None = None
    """Job type; default: WANDB_JOB_TYPE, else train."""
    tags: list[str] = field(default_factory=list)
    """Tags of the run; default: WANDB_TAGS."""
