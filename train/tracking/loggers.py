"""Lightning's loggers of a run folder: each continues there what an interrupted training began."""

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from lightning.pytorch.loggers import (
    CSVLogger,
    Logger,
    MLFlowLogger,
    TensorBoardLogger,
    WandbLogger,
)
from lightning.pytorch.utilities import rank_zero_only

from predictors.files import write_json
from train.config import LoggerKind
from train.errors import TrainError

if TYPE_CHECKING:
    from wandb import Settings

RUN_IDS = "tracking.json"
"""Ids of a run folder's runs in tracking servers, so that a resumed training continues them."""
TENSORBOARD = "tensorboard"
WANDB_STEP = "wandb_step"
"""File with the number of the next row of a run folder's run in Weights & Biases."""
MOST_CHARACTERS = 128
"""Largest length of a name in Weights & Biases."""


def open_logger(kind: LoggerKind, run_dir: Path, prefix: str = "") -> Logger:
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
            return open_wandb(run_dir, prefix)


class ContinuedWandbLogger(WandbLogger):
    """Keeps the number of the next row: offline, no server says where an interrupted run ended."""

    def __init__(self, run_dir: Path, **options: Any):
        super().__init__(**options)
        self._rows = run_dir / WANDB_STEP

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        super().log_metrics(metrics, step)
        if self.experiment.offline:
            self._rows.write_text(str(self.experiment.step))

    def continue_rows(self) -> None:
        """Let a new process number its rows from where the last one has ended."""
        if self.experiment.offline and self._rows.is_file():
            self.experiment.log({}, step=int(self._rows.read_text()), commit=False)


def forget_runs(run_dir: Path) -> None:
    """Let the next training in the folder start new runs and curves."""
    for name in (RUN_IDS, WANDB_STEP):
        (run_dir / name).unlink(missing_ok=True)
    shutil.rmtree(run_dir / TENSORBOARD, ignore_errors=True)


def read_run_ids(run_dir: Path) -> dict[str, str]:
    """Return the ids of the folder's runs, by kind of logger."""
    path = run_dir / RUN_IDS
    return json.loads(path.read_text()) if path.is_file() else {}


def keep_run_id(run_dir: Path, kind: LoggerKind, run_id: str) -> None:
    write_json(run_dir / RUN_IDS, {**read_run_ids(run_dir), kind.value: run_id})


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
        run_id=read_run_ids(run_dir).get(LoggerKind.MLFLOW),
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


def choose_wandb_names(run_dir: Path) -> dict[str, Any]:
    """Return the names of a run in Weights & Biases, as options of `WandbLogger`.

    They and its group, tags and owner are wandb's own settings: its environment and its files.

    Raises:
        TrainError: wandb does not allow one of them, or cannot write its artifacts.
    """
    import wandb
    from wandb.env import get_data_dir

    try:
        known = wandb.setup().settings
    except (wandb.Error, ValueError) as error:
        raise TrainError(f"logger=wandb: {' '.join(str(error).split())}") from error
    staged = Path(get_data_dir()).expanduser()
    existing = next(folder for folder in (staged, *staged.parents) if folder.exists())
    if not os.access(existing, os.W_OK):
        raise TrainError(
            f"logger=wandb: {existing} cannot be written to; set WANDB_DATA_DIR to a folder"
        )
    names = {"NAME": known.run_name, "RUN_GROUP": known.run_group, "RUN_ID": known.run_id}
    for variable, name in names.items():
        if name is not None and len(name) > MOST_CHARACTERS:
            raise TrainError(
                f"WANDB_{variable}={name}: {len(name)} characters, at most {MOST_CHARACTERS} are "
                "allowed"
            )
    return {
        "project": known.project or "moecast",
        "name": known.run_name or shorten_name(run_dir.resolve().name),
        "job_type": known.run_job_type or "train",
    }


def shorten_name(text: str) -> str:
    """Return a name that wandb allows: another one for each text."""
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", text)
    if name == text and len(name) <= MOST_CHARACTERS:
        return name
    digest = hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:8]
    return f"{name[: MOST_CHARACTERS - len(digest) - 1]}-{digest}"


def open_wandb(run_dir: Path, prefix: str) -> WandbLogger:
    """Open the run; wandb's login applies."""
    import wandb

    known, is_first = wandb.setup().settings, wandb.run is None
    run_id = known.run_id or read_run_ids(run_dir).get(LoggerKind.WANDB) or uuid4().hex[:8]
    run_dir.mkdir(parents=True, exist_ok=True)
    keep_run_id(run_dir, LoggerKind.WANDB, run_id)
    logger = ContinuedWandbLogger(
        run_dir,
        experiment=wandb.run,
        prefix=prefix,
        **choose_wandb_names(run_dir),
        save_dir=None if "root_dir" in known.model_fields_set else run_dir,
        id=run_id,
        mode=None if is_mode_known(known) else "offline",
    )
    try:
        _ = logger.experiment
        if is_first:
            logger.continue_rows()
    except wandb.Error as error:
        raise TrainError(f"logger=wandb: {error}") from error
    return logger


def is_mode_known(known: "Settings") -> bool:
    """Return whether the user has set a mode (WANDB_MODE, `wandb offline`) or logged in."""
    from wandb.sdk.lib import wbauth

    if "mode" in known.model_fields_set:
        return True
    login = wbauth.authenticate_session(
        host=known.base_url, source="moecast", prompt=False, update_session=False
    )
    return login is not None
