"""The interface of a destination of a run's curves, figures and files."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger

from collect.traces import Trace
from runtime.tools.report.html_report import HtmlReport


@dataclass(frozen=True, kw_only=True)
class TrackedEntry:
    """A zoo entry that a run has written."""

    name: str
    """MODEL/PREDICTOR."""
    folder: Path
    digest: str
    scores: Mapping[str, Any]
    """Held-out scores, as in the manifest."""
    is_best: bool
    """Whether it has the highest GoodPred of the run's entries."""


class Tracker:
    """One destination. Those that keep no files leave them to the run folder."""

    def logger(self, prefix: str = "") -> Logger:
        """Return Lightning's logger of this run; names of its metrics are `PREFIX-NAME`."""
        raise NotImplementedError

    def log_settings(self, settings: Mapping[str, Any]) -> None:
        self.logger().log_hyperparams(dict(settings))

    def log_summary(self, figures: Mapping[str, float]) -> None:
        logger = self.logger()
        logger.log_metrics(dict(figures))
        logger.save()

    def log_trace(self, trace: Trace, *, name: str) -> None:
        """Log the trace that the run learns from."""

    def log_entry(self, entry: TrackedEntry) -> None:
        """Log a zoo entry that the run has made."""

    def log_report(self, page: HtmlReport, path: Path) -> None:
        """Log the report's page at `path`, with its figures and tables."""

    def finish(self, *, succeeded: bool) -> None:
        self.logger().finalize("success" if succeeded else "failed")
