"""Loggers of training curves: a CSV file, or Weights & Biases."""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger

from runtime.tools.report.html_report import HtmlReport
from train.config import LoggerConfig, LoggerKind
from train.errors import TrainError


def make_logger(config: LoggerConfig, *, run_dir: Path, settings: Mapping[str, Any]) -> Logger:
    """Return the logger, with the run's settings logged as hyperparameters.

    wandb is imported only if it is selected. It stays offline unless WANDB_API_KEY is set, because
    without a key an online run stops at once.
    """
    if config.kind is LoggerKind.CSV:
        logger: Logger = CSVLogger(run_dir, name="logs")
    else:
        from lightning.pytorch.loggers import WandbLogger

        try:
            logger = WandbLogger(
                project=config.project,
                name=config.run_name or run_dir.name,
                save_dir=run_dir,
                offline="WANDB_API_KEY" not in os.environ,
            )
        except ModuleNotFoundError as error:
            raise TrainError(f"logger=wandb: {error}; pip install wandb, or logger=csv") from error
    logger.log_hyperparams(dict(settings))
    return logger


def log_entries(logger: Logger, entries: Mapping[str, Path], metadata: Mapping[str, Any]) -> None:
    """Log each predictor to wandb as an artifact of type `model`; other loggers keep files only."""
    if type(logger).__name__ != "WandbLogger":
        return
    import wandb

    for kind, folder in entries.items():
        name = f"{metadata['model']}-{kind}".replace("/", "-")
        artifact = wandb.Artifact(name, type="model", metadata=dict(metadata))
        artifact.add_dir(str(folder))
        logger.experiment.log_artifact(artifact)


def log_report(config: LoggerConfig, page: HtmlReport, path: Path, run_dir: Path) -> None:
    """Log the report to wandb as a separate run, NAME-report; other loggers keep files only.

    The run has each figure as an image, the values of each figure and table as a table, and the
    page.
    """
    if config.kind is not LoggerKind.WANDB:
        return
    name = f"{config.run_name or run_dir.name}-report"
    settings = {"page": str(path)}
    logger = make_logger(replace(config, run_name=name), run_dir=run_dir, settings=settings)
    import wandb

    logged: dict[str, Any] = {"report/page": wandb.Html(str(path), inject=False)}
    for section in page.sections:
        if section.draw is not None:
            picture = str(path.with_name(f"{section.name}.png"))
            logged[f"report/{section.name}"] = wandb.Image(picture, caption=section.heading)
        if section.columns:
            rows = [list(row) for row in section.rows]
            # A null among numbers was not measured; types cannot be inferred from it.
            values = wandb.Table(columns=list(section.columns), data=rows, allow_mixed_types=True)
            logged[f"report/{section.name}/values"] = values
    logger.experiment.log(logged)
    finish(logger, "success")


def log_summary(logger: Logger, table: Mapping[str, Mapping[str, Any]]) -> None:
    """Log the final per-layer figures, in wandb also as curves over the layers."""
    flat = {
        f"held_out/{name}/{metric}/layer_{layer:02d}": value
        for name, one in table.items()
        for metric in ("accuracy", "fetch_rate", "good_pred")
        for layer, value in enumerate(one[metric])
        if value is not None
    }
    logger.log_metrics(flat)
    logger.save()


def finish(logger: Logger, status: str) -> None:
    """Close the logger's files; a wandb run is ended, so that the process may start another."""
    logger.finalize(status)
    if type(logger).__name__ == "WandbLogger":
        logger.experiment.finish()
