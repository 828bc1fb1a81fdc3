"""Options of experiment tracking."""

from enum import StrEnum


class LoggerKind(StrEnum):
    """Destination of a run's curves and figures."""

    CSV = "csv"
    TENSORBOARD = "tensorboard"
    MLFLOW = "mlflow"
    WANDB = "wandb"
