"""A run in MLflow, with its entries and its report as artifacts."""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger, MLFlowLogger

from runtime.tools.report.html_report import HtmlReport
from train.errors import TrainError
from train.tracking.run_ids import FILE, read_run_id, write_run_id
from train.tracking.tracker import TrackedEntry, Tracker

SERVER = "mlflow"


class MlflowTracker(Tracker):
    """The server and the experiment are MLflow's own settings.

    These are MLFLOW_TRACKING_URI (mlflow.db in the working folder by default) and
    MLFLOW_EXPERIMENT_NAME (moecast by default).

    Raises:
        TrainError: the server does not answer, or has no such run.
    """

    def __init__(self, run_dir: Path):
        import mlflow
        from mlflow.exceptions import MlflowException

        # Each database migration and each missing experiment would be a line.
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        self._uri = mlflow.get_tracking_uri()
        self._experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "moecast"
        self._name = run_dir.name
        try:
            self._main = self._make(read_run_id(run_dir, SERVER))
            self._id = self._main.run_id
        except MlflowException as error:
            raise TrainError(
                f"logger=mlflow: {self._uri}: {error} (the run's id is in {run_dir / FILE}: remove "
                "that file to start a new run)"
            ) from error
        assert self._id is not None
        write_run_id(run_dir, SERVER, self._id)

    def _make(self, run_id: str | None, prefix: str = "") -> MLFlowLogger:
        return MLFlowLogger(
            self._experiment,
            run_name=self._name,
            tracking_uri=self._uri,
            run_id=run_id,
            prefix=prefix,
        )

    def logger(self, prefix: str = "") -> Logger:
        return self._make(self._id, prefix) if prefix else self._main

    def log_settings(self, settings: Mapping[str, Any]) -> None:
        # Parameters cannot be changed: those of a continued run stay.
        if not self._main.experiment.get_run(self._id).data.params:
            super().log_settings(settings)

    def log_entry(self, entry: TrackedEntry) -> None:
        self._log_folder(entry.folder, f"entries/{entry.folder.name}")

    def log_report(self, page: HtmlReport, path: Path) -> None:  # noqa: ARG002
        self._log_folder(path.parent, path.parent.name)

    def _log_folder(self, folder: Path, name: str) -> None:
        self._main.experiment.log_artifacts(self._id, str(folder), name)
