"""One training over processes that Ray Train starts, on this machine or a cluster.

Each takes its share of every batch (Lightning's DDP), as `devices=N` does without Ray.
"""

import csv
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger

from collect.errors import LaunchError
from collect.launch.ray import check_head, join_ray
from collect.plan import absolute_if_exists, absolute_path
from collect.traces import Trace
from runtime.config import ModelConfig
from runtime.serving.ray_cluster import HEAD_POLL_SECONDS, HeadWatch
from train.config import TrainConfig
from train.fit import CHECKPOINTS, LAST, FitSettings, Fitted, Training
from train.nonlearned import RouterWeights
from train.pipeline import make_stacks

CURVES = Path("ray", "curves")
"""Folder, in the run folder, of the curves as the first process of each try writes them."""
CSV = "metrics.csv"
PAUSE_SECONDS = 0.5
"""Between two questions to a head that does not answer."""


def fit_ray_ddp(training: Training, config: TrainConfig, loggers: Sequence[Logger]) -> Fitted:
    """Trains families as `make_stacks` makes them; all processes share RUN_DIR.

    Equals one process up to the order of additions: gradients are the mean of the shares'. The
    loggers get the curves when it has ended. When a process fails or its node dies, Ray starts all
    of them again, up to `launcher.retries` times, and they go on after the last whole epoch.

    Raises:
        LaunchError: Ray Train is not installed, no such cluster, its head is lost, or a process
            failed too often.
    """
    launcher, run_dir, settings = config.launcher, config.folder, training.settings
    owns_ray = join_ray(launcher, num_cpus=settings.devices * launcher.cpus)
    import ray

    try:
        from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
        from ray.train.torch import TorchTrainer
    except ImportError as error:
        raise LaunchError(
            f"launcher=ray devices={settings.devices} needs Ray Train ({error}): "
            "pip install 'moecast[ray]'"
        ) from error
    started, last = time.perf_counter(), training.folder / LAST
    shutil.rmtree(run_dir / CURVES, ignore_errors=True)
    if config.overwrite:
        # Not by one of the processes: another might still see it.
        last.unlink(missing_ok=True)
    resumed = last.exists()
    resources = {"CPU": launcher.cpus} | ({"GPU": launcher.gpus} if launcher.gpus else {})
    trainer = TorchTrainer(
        train_share,
        train_loop_config={
            "trace": absolute_path(training.trace.where),
            "model": {**asdict(config.model), "id": absolute_if_exists(config.model.id)},
            "settings": asdict(settings),
            "run_dir": str(run_dir.resolve()),
        },
        scaling_config=ScalingConfig(
            num_workers=settings.devices, use_gpu=launcher.gpus > 0, resources_per_worker=resources
        ),
        run_config=RunConfig(
            name="moecast",
            storage_path=str(run_dir.resolve() / "ray"),
            failure_config=FailureConfig(max_failures=launcher.retries),
        ),
    )
    sys.stderr.write(f"training on {settings.devices} devices; Ray's logs: {run_dir / 'ray'}\n")
    try:
        watch = HeadWatch(launcher.ray_address)
        watch_head(trainer.fit, watch)
    except (TrainingFailedError, ray.exceptions.RayError) as error:
        # Without its head, or with a new one, processes end as well: then that is the reason.
        while not check_head(watch, at_once=True):
            time.sleep(PAUSE_SECONDS)
        raise LaunchError(f"training with Ray failed: {_last_line(error)}") from error
    finally:
        if owns_ray:
            ray.shutdown()
    tries = sorted((run_dir / CURVES).glob(f"*/{CSV}"))
    log_curves(tries, loggers)
    return training.take_best_epoch(started=started, resumed=resumed or len(tries) > 1)


def watch_head(run: Callable[[], object], watch: HeadWatch) -> None:
    """Calls `run` in a thread of its own: without the head it might never return.

    Raises:
        LaunchError: the head is lost.
        BaseException: what `run` has raised.
    """
    outcome: Future[object] = Future()

    def call() -> None:
        try:
            outcome.set_result(run())
        except BaseException as error:
            outcome.set_exception(error)

    # A daemon, as it may still wait when this process ends.
    threading.Thread(target=call, name="ray-train", daemon=True).start()
    while not wait([outcome], HEAD_POLL_SECONDS).done:
        check_head(watch)
    outcome.result()


def train_share(config: dict[str, Any]) -> None:
    """Runs in each process; the weights are in the checkpoints."""
    import ray.train
    from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment

    fields = config["settings"]
    settings = FitSettings(**{**fields, "kinds": tuple(fields["kinds"])})
    trace = Trace.open(config["trace"], verify=False)
    routers = RouterWeights(ModelConfig(**config["model"]), trace.spec)
    families = make_stacks(trace, routers, settings)
    run_dir = Path(config["run_dir"])
    first = ray.train.get_context().get_world_rank() == 0
    # Lightning's logger would delete the file of an earlier try.
    tries = len(list((run_dir / CURVES).glob("*"))) if first else 0
    logger: Logger = CSVLogger(run_dir, name=str(CURVES), version=f"{tries:03d}")
    training = Training(trace, families, settings, run_dir / CHECKPOINTS)
    training.run_epochs([logger], strategy=RayDDPStrategy(), environment=RayLightningEnvironment())


def log_curves(tries: Iterable[Path], loggers: Sequence[Logger]) -> None:
    """Log the rows that Lightning's CSVLogger has written in each try, of repeated steps the last.

    A training that was finished before has none.
    """
    rows: list[dict[str, str]] = []
    for path in tries:
        with path.open(newline="") as file:
            again = list(csv.DictReader(file))
        if again:
            rows = [row for row in rows if int(row["step"]) < int(again[0]["step"])] + again
    for row in rows:
        step = int(row.pop("step"))
        figures = {name: float(value) for name, value in row.items() if value}
        for logger in loggers:
            logger.log_metrics(figures, step=step)


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(error).__name__
