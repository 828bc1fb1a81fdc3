"""Lightning's loggers of a run folder: each continues there what an interrupted training began."""

import json
import logging
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

from lightning.pytorch.loggers import (
    CSVLogger,
    Logger,
    MLFlowLogger,
    TensorBoardLogger,
    WandbLogger,
)

from predictors.files import write_json
from train.errors import TrainError
from train.tracking.config import LoggerKind, WandbConfig

if TYPE_CHECKING:
    from wandb import Settings

RUN_IDS = "tracking.json"
"""Ids of a run folder's runs in tracking servers, so that a resumed training continues them."""
TENSORBOARD = "tensorboard"


def open_logger(kind: LoggerKind, run_dir: Path, wandb: WandbConfig, prefix: str = "") -> Logger:
    """Open a run folder's logger, in which names of metrics are `PREFIX-NAME`.

    CSV has a folder for each; in the others they are of the same run.

    Raises:
        TrainError: wandb refuses the run, or the MLflow server does not answer or has no such run.
    """
    match kind:
        case LoggerKind.CSV:
            return CSVLogger(run_dir, name="logs", prefix=prefix)
        case LoggerKind.TENSORBOARD:
            return TensorBoardLogger(
                run_dir, name=TENSORBOARD, version="", prefix=prefix, default_hp_metric=False
            )
        case LoggerKind.MLFLOW:
            return open_mlflow(run_dir, prefix)
        case LoggerKind.WANDB:
            return open_wandb(run_dir, wandb, prefix)


def forget_runs(run_dir: Path) -> None:
    """Let the next training in the folder start new runs and curves."""
    (run_dir / RUN_IDS).unlink(missing_ok=True)
    shutil.rmtree(run_dir / TENSORBOARD, ignore_errors=True)


def read_run_id(run_dir: Path, kind: LoggerKind) -> str | None:
    """Return the id of the folder's run; None if it has none yet."""
    path = run_dir / RUN_IDS
    return json.loads(path.read_text()).get(kind.value) if path.is_file() else None


def keep_run_id(run_dir: Path, kind: LoggerKind, run_id: str) -> None:
    path = run_dir / RUN_IDS
    known = json.loads(path.read_text()) if path.is_file() else {}
    write_json(path, {**known, kind.value: run_id})


def open_mlflow(run_dir: Path, prefix: str) -> MLFlowLogger:
    """The server and the experiment are MLflow's own settings.

    These are MLFLOW_TRACKING_URI (mlflow.db in the working folder by default) and
    MLFLOW_EXPERIMENT_NAME (moecast by default).
    """
    import mlflow
    from mlflow.exceptions import MlflowException

    # Each database migration and each missing experiment would be a line.
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    uri = mlflow.get_tracking_uri()
    logger = MLFlowLogger(
        os.environ.get("MLFLOW_EXPERIMENT_NAME") or "moecast",
        run_name=run_dir.name,
        tracking_uri=uri,
        run_id=read_run_id(run_dir, LoggerKind.MLFLOW),
        prefix=prefix,
    )
    try:
        run_id = logger.run_id
    except MlflowException as error:
        raise TrainError(
            f"logger=mlflow: {uri}: {error} (the run's id is in {run_dir / RUN_IDS}: remove that "
            "file to start a new run)"
        ) from error
    assert run_id is not None
    keep_run_id(run_dir, LoggerKind.MLFLOW, run_id)
    return logger


def open_wandb(run_dir: Path, config: WandbConfig, prefix: str) -> WandbLogger:
    """Wandb's environment, settings files and login apply wherever an option says nothing else."""
    import wandb

    known = wandb.setup().settings
    run_id = known.run_id or read_run_id(run_dir, LoggerKind.WANDB) or uuid4().hex[:8]
    run_dir.mkdir(parents=True, exist_ok=True)
    keep_run_id(run_dir, LoggerKind.WANDB, run_id)
    logger = WandbLogger(
        experiment=wandb.run,
        prefix=prefix,
        project=config.project or known.project or "moecast",
        entity=config.entity,
        name=config.name or known.run_name or run_dir.resolve().name,
        group=config.group,
        job_type=config.job_type or known.run_job_type or "train",
        tags=config.tags or None,
        save_dir=None if "root_dir" in known.model_fields_set else run_dir,
        id=run_id,
        mode=None if is_mode_known(known) else "offline",
    )
    try:
        _ = logger.experiment
    except wandb.Error as error:
        raise TrainError(f"logger=wandb: {error}") from error
    return logger


def is_mode_known(known: "Settings") -> bool:
    """Return whether the user has set a mode (WANDB_MODE, `wandb offline`) or logged in."""
    from wandb.sdk.lib import wbauth

    if "mode" in known.model_fields_set:
        return True
    found = wbauth.authenticate_session(
        host=known.base_url, source="moecast", prompt=False, update_session=False
    )
    return found is not None
