"""Curves in files of the run folder: CSV and TensorBoard."""

import shutil
from pathlib import Path

from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger

from train.tracking.tracker import Tracker

TENSORBOARD = "tensorboard"


class CsvTracker(Tracker):
    """`RUN_DIR/logs/version_N/metrics.csv`: a file for each training, as Lightning writes them."""

    def __init__(self, run_dir: Path):
        self._run_dir = run_dir
        self._main = CSVLogger(run_dir, name="logs")

    def logger(self, prefix: str = "") -> Logger:
        return CSVLogger(self._run_dir, name="logs", prefix=prefix) if prefix else self._main


class TensorBoardTracker(Tracker):
    """`RUN_DIR/tensorboard`: a resumed training continues the curves, another one removes them."""

    def __init__(self, run_dir: Path, *, overwrite: bool):
        self._run_dir = run_dir
        if overwrite and (run_dir / TENSORBOARD).is_dir():
            shutil.rmtree(run_dir / TENSORBOARD)
        self._main = self._make(run_dir)

    @staticmethod
    def _make(run_dir: Path, prefix: str = "") -> Logger:
        return TensorBoardLogger(
            run_dir, name=TENSORBOARD, version="", prefix=prefix, default_hp_metric=False
        )

    def logger(self, prefix: str = "") -> Logger:
        return self._make(self._run_dir, prefix) if prefix else self._main
