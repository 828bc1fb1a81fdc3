"""A training run in every logger that was chosen: curves, settings, figures, files and lineage."""

import json
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from lightning.pytorch.loggers import Logger, MLFlowLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only

from collect.traces import Trace
from collect.traces.manifest import MANIFEST
from predictors.files import explain_no_home, has_home
from runtime.sim.hardware import Hardware
from runtime.tools.report.html_report import HtmlReport
from runtime.tools.report.provenance import RUN_FILE, describe_origin
from train.config import LoggerKind, TrainConfig
from train.errors import TrainError
from train.tracking.loggers import choose_wandb_names, forget_runs, open_logger, shorten_name
from zoo.comparison import layer_figures
from zoo.entry import open_entry

PACKAGES = {
    LoggerKind.TENSORBOARD: ("tensorboard",),
    LoggerKind.MLFLOW: ("mlflow", "sqlalchemy", "alembic"),
}
"""Packages of the loggers that are extras."""

GROUP = "held_out"
"""The final figures of a run's predictors are `held_out/PREDICTOR/FIGURE` in every logger."""


class TrackedRun:
    """Logs a run everywhere, and ends it there when the context is left.

    CSV and TensorBoard keep no files, which stay in the run folder.

    Raises:
        TrainError: a logger's package is not installed, or a name is not allowed, or it needs a
            home folder.
    """

    def __init__(self, config: TrainConfig):
        self._config, self._run_dir = config, config.folder
        # Before a trace is recorded, which may take hours.
        for kind in map(LoggerKind, config.logger):
            missing = [name for name in PACKAGES.get(kind, ()) if find_spec(name) is None]
            if missing:
                raise TrainError(
                    f"logger={kind} needs {', '.join(missing)}: pip install 'moecast[{kind}]'"
                )
            if kind in (LoggerKind.WANDB, LoggerKind.MLFLOW) and not has_home():
                raise TrainError(f"logger={kind}: {explain_no_home()}")
            if kind is LoggerKind.WANDB:
                choose_wandb_names(self._run_dir)
        self._loggers: dict[LoggerKind, Logger] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        with ExitStack() as stack:
            for logger in self._loggers.values():
                if isinstance(logger, WandbLogger):
                    stack.callback(logger.experiment.finish, exit_code=int(error is not None))
                else:
                    stack.callback(logger.finalize, "success" if error is None else "failed")

    def loggers(self, prefix: str = "") -> list[Logger]:
        """Return Lightning's loggers of this run; names of their metrics are `PREFIX-NAME`."""
        if not prefix:
            return list(self._loggers.values())
        return [open_logger(kind, self._run_dir, prefix) for kind in self._loggers]

    def start(self, trace: Trace, machines: Iterable[Hardware] = ()) -> None:
        """Open the run everywhere; log its resolved settings and the trace that it learns from."""
        # Lightning runs the command once for each device: the first process logs.
        if rank_zero_only.rank != 0:
            return
        if self._config.overwrite:
            forget_runs(self._run_dir)
        # In the order of LoggerKind: those that need a server last.
        for kind in LoggerKind:
            if kind in self._config.logger:
                self._loggers[kind] = open_logger(kind, self._run_dir)
        settings = resolved_settings(self._config, trace, machines)
        for logger in self._loggers.values():
            # MLflow's parameters cannot be changed: those of a continued run stay.
            is_mlflow = isinstance(logger, MLFlowLogger)
            if not is_mlflow or not logger.experiment.get_run(logger.run_id).data.params:
                logger.log_hyperparams(settings)
            if isinstance(logger, WandbLogger):
                name = f"{self._config.model.name}-{trace.manifest.plan.dataset}-trace"
                log_trace(logger, trace, name=shorten_name(name))

    def log_summary(self, figures: Mapping[str, float]) -> None:
        """Log final figures: one value each."""
        for logger in self._loggers.values():
            if isinstance(logger, WandbLogger):
                logger.experiment.summary.update(dict(figures))
            else:
                logger.log_metrics(dict(figures))
                logger.save()

    def log_entries(self, entries: Mapping[str, Path]) -> None:
        for logger in self._loggers.values():
            if isinstance(logger, WandbLogger):
                log_entries(logger, entries, model=self._config.model.name)
            elif isinstance(logger, MLFlowLogger):
                for folder in entries.values():
                    log_folder(logger, folder, f"entries/{folder.name}")

    def log_report(self, page: HtmlReport, path: Path) -> None:
        """Log the report's page at `path`, with its figures and tables."""
        for logger in self._loggers.values():
            if isinstance(logger, WandbLogger):
                log_report(logger, page, path)
            elif isinstance(logger, MLFlowLogger):
                log_folder(logger, path.parent, path.parent.name)


def log_folder(logger: MLFlowLogger, folder: Path, name: str) -> None:
    logger.experiment.log_artifacts(logger.run_id, str(folder), name)


def log_trace(logger: WandbLogger, trace: Trace, *, name: str) -> None:
    """Log trace.json, which has the digest of every shard, as an input of the run."""
    import wandb

    run, plan = logger.experiment, trace.manifest.plan
    artifact = wandb.Artifact(
        name,
        type="dataset",
        metadata={
            "digest": trace.digest,
            "where": trace.where,
            "dataset": plan.dataset,
            "tokens": trace.num_tokens,
            "held_out_tokens": len(trace.rows("held_out")),
            "model": trace.spec.as_dict(),
        },
    )
    with artifact.new_file(MANIFEST, mode="wb") as file:
        file.write(trace.manifest.to_bytes())
    aliases = ["latest", trace.digest]
    if run.offline:
        # `use_artifact` refuses to work offline; this is what it records for a new artifact.
        run._log_artifact(artifact, aliases=aliases, is_user_created=True, use_after_commit=True)
    else:
        run.use_artifact(artifact, aliases=aliases)


def log_entries(logger: WandbLogger, entries: Mapping[str, Path], *, model: str) -> None:
    """Log zoo entries as models; the one with the shortest replayed TPOT is the best."""
    import wandb

    opened = {name: open_entry(folder) for name, folder in entries.items()}
    times = {name: layer_figures(entry).get("mean_tpot_ms") for name, entry in opened.items()}
    measured = {name: time for name, time in times.items() if isinstance(time, int | float)}
    best = min(measured, key=lambda name: measured[name], default=None)
    for name, entry in opened.items():
        manifest = entry.manifest
        artifact = wandb.Artifact(
            # Not the entry's name, in which other characters than a zoo's are lost.
            shorten_name(f"{model.lower()}-{name}"),
            type="model",
            metadata={
                "digest": manifest.digest,
                **manifest.metrics,
                "kind": manifest.kind,
                "trace_digest": manifest.trace_digest,
                "model": manifest.model.model_dump(mode="json"),
            },
        )
        artifact.add_dir(str(entries[name]))
        aliases = ["latest", manifest.digest, *(["best"] if name == best else [])]
        logger.experiment.log_artifact(artifact, aliases=aliases)


def log_report(logger: WandbLogger, page: HtmlReport, path: Path) -> None:
    import wandb

    logged: dict[str, Any] = {"report/page": wandb.Html(str(path), inject=False)}
    for section in page.sections:
        if section.draw is not None:
            picture = str(path.with_name(f"{section.name}.png"))
            logged[f"report/{section.name}"] = wandb.Image(picture, caption=section.heading)
        if section.table is not None:
            columns = section.table.columns
            rows = [[column.get(row) for column in columns] for row in section.table.rows]
            # A null among numbers was not measured; types cannot be inferred from it.
            logged[f"report/{section.name}/values"] = wandb.Table(
                columns=[column.key for column in columns], data=rows, allow_mixed_types=True
            )
    logger.log_metrics(logged)


def resolved_settings(
    config: TrainConfig, trace: Trace, machines: Iterable[Hardware]
) -> dict[str, Any]:
    """Return the whole configuration, and the trace, model and machines that it resolved to.

    The configuration is that of run.json, which has no secrets; one that no command composed has
    none.
    """
    path = config.folder / RUN_FILE
    if path.is_file():
        options = json.loads(path.read_text())["config"]
    else:
        options = json.loads(json.dumps(asdict(config), default=str))
    return {
        **options,
        "base_model": trace.spec.as_dict(),
        "trace_digest": trace.digest,
        "trace_dataset": trace.manifest.plan.dataset,
        "trace_tokens": trace.num_tokens,
        "machines": {machine.name: asdict(machine) for machine in machines},
        "origin": describe_origin(config.folder),
    }


def summary_figures(results: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return `held_out/PREDICTOR/FIGURE` of each predictor, without those not measured.

    FetchRate, both GoodPreds and TPOT are those of the first machine; latency is the median time
    of one layer's events at batch 1.
    """
    figures: dict[str, float] = {}
    for name, result in results.items():
        latency = result["latency_us"]["1"]
        values = {
            "accuracy": result["mean_accuracy"],
            "worst_layer_accuracy": result["worst_layer_accuracy"],
            "fetch_rate": result["mean_fetch_rate"],
            "good_pred": result["mean_good_pred"],
            "promoe_good_pred": result["mean_promoe_good_pred"],
            "tpot_ms": result["mean_tpot_ms"],
            "latency_us": None if latency is None else latency["layer_p50"],
            "bytes": result["bytes"],
        }
        figures |= {
            f"{GROUP}/{name}/{figure}": float(value)
            for figure, value in values.items()
            if value is not None
        }
    return figures
