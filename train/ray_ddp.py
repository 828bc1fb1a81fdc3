"""One training over processes that Ray Train starts, on this machine or a cluster.

Each takes its share of every batch (Lightning's DDP), as `devices=N` does without Ray.
"""

import csv
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger

from collect.errors import LaunchError
from collect.launch.ray import join_ray
from collect.recording import absolute_if_exists, absolute_path
from collect.traces import Trace
from predictors.files import write_atomic
from runtime.config import ModelConfig
from train.checkpoint import from_bytes, to_bytes
from train.config import TrainConfig
from train.fit import CHECKPOINTS, FitSettings, Fitted, Peers, fit
from train.pipeline import make_stacks
from train.predictor_stack import PredictorStack
from train.routers import RouterWeights

RESULT = "ray_ddp.ckpt"
CURVES = Path("ray", "curves")
"""Folder, in the run folder, of the curves as the first process writes them."""
CSV = "metrics.csv"


def fit_ray_ddp(
    trace: Trace,
    families: Sequence[PredictorStack],
    settings: FitSettings,
    config: TrainConfig,
    *,
    loggers: Sequence[Logger],
) -> Fitted:
    """Trains `families`, which are as `make_stacks` makes them; all processes share RUN_DIR.

    Equals one process up to the order of additions: gradients are the mean of the shares'. The
    loggers get the curves when it has ended.

    Raises:
        LaunchError: Ray Train is not installed, no such cluster, or a process failed.
    """
    assert config.run_dir is not None
    launcher, run_dir = config.launcher, config.run_dir
    owns_ray = join_ray(launcher, num_cpus=settings.devices * launcher.cpus)
    import ray

    try:
        from ray.train import RunConfig, ScalingConfig, TrainingFailedError
        from ray.train.torch import TorchTrainer
    except ImportError as error:
        raise LaunchError(
            f"launcher=ray devices={settings.devices} needs Ray Train ({error}): "
            "pip install 'moecast[ray]'"
        ) from error
    started = time.perf_counter()
    result = run_dir.resolve() / RESULT
    curves = run_dir / CURVES / CSV
    for left_over in (result, curves):
        left_over.unlink(missing_ok=True)
    if config.overwrite:
        # Not by one of the processes: another might still see it.
        (run_dir / CHECKPOINTS / "last.ckpt").unlink(missing_ok=True)
    resources = {"CPU": launcher.cpus} | ({"GPU": launcher.gpus} if launcher.gpus else {})
    trainer = TorchTrainer(
        train_share,
        train_loop_config={
            "trace": absolute_path(trace.where),
            "model": {**asdict(config.model), "id": absolute_if_exists(config.model.id)},
            "settings": asdict(settings),
            "run_dir": str(run_dir.resolve()),
        },
        scaling_config=ScalingConfig(
            num_workers=settings.devices, use_gpu=launcher.gpus > 0, resources_per_worker=resources
        ),
        run_config=RunConfig(name="moecast", storage_path=str(run_dir.resolve() / "ray")),
    )
    sys.stderr.write(f"training on {settings.devices} devices; Ray's logs: {run_dir / 'ray'}\n")
    try:
        trainer.fit()
    except (TrainingFailedError, ray.exceptions.RayError) as error:
        raise LaunchError(f"training with Ray failed: {_last_line(error)}") from error
    finally:
        if owns_ray:
            ray.shutdown()
    # A training that was finished before has none.
    if curves.is_file():
        log_curves(curves, loggers)
    made = from_bytes(result.read_bytes(), what=str(result))
    for family, weights in zip(families, made["families"], strict=True):
        family.load_state_dict(weights)
        family.eval()
    return Fitted(
        list(families),
        made["steps"],
        time.perf_counter() - started,
        resumed=made["resumed"],
        best_epoch=made["best_epoch"],
        validation_accuracy=made["validation_accuracy"],
    )


def train_share(config: dict[str, Any]) -> None:
    """Runs in each process; the first one writes the trained weights."""
    import ray.train
    from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment

    fields = config["settings"]
    settings = FitSettings(**{**fields, "kinds": tuple(fields["kinds"])})
    trace = Trace.open(config["trace"], verify=False)
    families = make_stacks(
        trace, RouterWeights(ModelConfig(**config["model"]), trace.spec), settings, settings.kinds
    )
    run_dir = Path(config["run_dir"])
    first = ray.train.get_context().get_world_rank() == 0
    logger: Logger = CSVLogger(run_dir, name=str(CURVES), version="")
    fitted = fit(
        trace,
        families,
        settings,
        run_dir=run_dir,
        loggers=[logger],
        peers=Peers(RayDDPStrategy(), RayLightningEnvironment()),
    )
    if first:
        tree = {
            "families": [dict(family.state_dict()) for family in fitted.families],
            "steps": fitted.steps,
            "resumed": fitted.resumed,
            "best_epoch": fitted.best_epoch,
            "validation_accuracy": fitted.validation_accuracy,
        }
        write_atomic(run_dir / RESULT, to_bytes(tree))


def log_curves(path: Path, loggers: Sequence[Logger]) -> None:
    """Log the rows that Lightning's CSVLogger has written."""
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            step = int(row.pop("step"))
            figures = {name: float(value) for name, value in row.items() if value}
            for logger in loggers:
                logger.log_metrics(figures, step=step)


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(error).__name__
