"""A training run in every destination that was chosen."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from collect.traces import Trace
from runtime.tools.report.html_report import HtmlReport
from train.config import TrainConfig
from train.errors import TrainError
from train.tracking.config import LoggerKind
from train.tracking.local import CsvTracker, TensorBoardTracker
from train.tracking.mlflow_tracker import MlflowTracker
from train.tracking.run_ids import forget_run_ids
from train.tracking.tracker import TrackedEntry, Tracker
from train.tracking.wandb_tracker import WandbTracker
from zoo.entry import open_entry

PACKAGES = {
    LoggerKind.TENSORBOARD: ("tensorboard",),
    LoggerKind.MLFLOW: ("mlflow", "sqlalchemy", "alembic"),
}
"""Packages of the loggers that are extras."""


class TrackedRun:
    """Logs a run to all of its destinations, and ends it there when the context is left.

    Raises:
        TrainError: a destination's package is not installed.
    """

    def __init__(self, config: TrainConfig):
        assert config.run_dir is not None
        self._config, self._run_dir = config, config.run_dir
        # Before a trace is recorded, which may take hours.
        for kind in map(LoggerKind, config.logger):
            missing = [name for name in PACKAGES.get(kind, ()) if find_spec(name) is None]
            if missing:
                raise TrainError(
                    f"logger={kind} needs {', '.join(missing)}: pip install 'moecast[{kind}]'"
                )
        self._trackers: list[Tracker] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with ExitStack() as stack:
            for tracker in self._trackers:
                stack.callback(tracker.finish, succeeded=error is None)

    def loggers(self, prefix: str = "") -> list[Logger]:
        """Return a logger of each destination, for Lightning's trainer."""
        return [tracker.logger(prefix) for tracker in self._trackers]

    def start(self, settings: Mapping[str, Any], trace: Trace) -> None:
        """Open the run everywhere; log its resolved settings and the trace that it learns from."""
        # Lightning runs the command once for each device: the first process logs.
        if rank_zero_only.rank != 0:
            return
        if self._config.overwrite:
            forget_run_ids(self._run_dir)
        # In the order of LoggerKind: those that need a server last.
        for kind in LoggerKind:
            if kind in self._config.logger:
                self._trackers.append(open_tracker(kind, self._config, self._run_dir))
        name = f"{self._config.model.name}-{trace.manifest.plan.dataset}-trace"
        for tracker in self._trackers:
            tracker.log_settings(settings)
            tracker.log_trace(trace, name=name)

    def log_summary(self, figures: Mapping[str, float]) -> None:
        """Log final figures: one value each."""
        for tracker in self._trackers:
            tracker.log_summary(figures)

    def log_entries(self, entries: Mapping[str, Path]) -> None:
        for entry in describe_entries(list(entries.values())):
            for tracker in self._trackers:
                tracker.log_entry(entry)

    def log_report(self, page: HtmlReport, path: Path) -> None:
        for tracker in self._trackers:
            tracker.log_report(page, path)


def open_tracker(kind: LoggerKind, config: TrainConfig, run_dir: Path) -> Tracker:
    match kind:
        case LoggerKind.CSV:
            return CsvTracker(run_dir)
        case LoggerKind.TENSORBOARD:
            return TensorBoardTracker(run_dir, overwrite=config.overwrite)
        case LoggerKind.MLFLOW:
            return MlflowTracker(run_dir)
        case LoggerKind.WANDB:
            return WandbTracker(run_dir, config.wandb)


def describe_entries(folders: Sequence[Path]) -> list[TrackedEntry]:
    manifests = {folder: open_entry(folder).manifest for folder in folders}

    def good_pred(folder: Path) -> float:
        value = manifests[folder].metrics.get("good_pred")
        return float(value) if isinstance(value, int | float) else -1.0

    best = max(folders, key=good_pred, default=None)
    return [
        TrackedEntry(
            name=manifest.name,
            folder=folder,
            digest=manifest.digest,
            scores={
                **manifest.metrics,
                "kind": manifest.kind,
                "trace_digest": manifest.trace_digest,
                "model": manifest.model.model_dump(mode="json"),
            },
            is_best=folder == best and good_pred(folder) >= 0,
        )
        for folder, manifest in manifests.items()
    ]
