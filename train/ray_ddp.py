"""One training over processes that Ray Train starts, on this machine or a cluster.

Each takes its share of every batch (Lightning's DDP), as `devices=N` does without Ray.
"""

import csv
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger

from collect.errors import LaunchError
from collect.launch.ray import check_head, join_ray
from collect.recording import absolute_if_exists, absolute_path
from collect.traces import Trace
from predictors.files import write_atomic
from runtime.config import ModelConfig
from runtime.serving.ray_cluster import HEAD_POLL_SECONDS, HeadWatch
from train.checkpoint import from_bytes, to_bytes
from train.config import TrainConfig
from train.fit import CHECKPOINTS, FitSettings, Fitted, Peers, fit
from train.pipeline import make_stacks
from train.predictor_stack import PredictorStack
from train.routers import RouterWeights

RESULT = "ray_ddp.ckpt"
CURVES = Path("ray", "curves")
"""Folder, in the run folder, of the curves as the first process of each try writes them."""
CSV = "metrics.csv"
PAUSE_SECONDS = 0.5
"""Between two questions to a head that does not answer."""


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
    loggers get the curves when it has ended. When a process fails or its node dies, Ray starts all
    of them again, up to `launcher.retries` times, and they go on after the last whole epoch.

    Raises:
        LaunchError: Ray Train is not installed, no such cluster, its head is lost, or a process
            failed too often.
    """
    assert config.run_dir is not None
    launcher, run_dir = config.launcher, config.run_dir
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
    started = time.perf_counter()
    result = run_dir.resolve() / RESULT
    result.unlink(missing_ok=True)
    shutil.rmtree(run_dir / CURVES, ignore_errors=True)
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
    log_curves(run_dir / CURVES, loggers)
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
    # Lightning's logger would delete the file of an earlier try.
    tries = len(list((run_dir / CURVES).glob("*"))) if first else 0
    logger: Logger = CSVLogger(run_dir, name=str(CURVES), version=f"{tries:03d}")
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


def log_curves(folder: Path, loggers: Sequence[Logger]) -> None:
    """Log the rows that Lightning's CSVLogger has written in each try.

    A training that was finished before has none. Of steps that were done twice, the last are
    logged.
    """
    tries = [list(read_curves(path)) for path in sorted(folder.glob(f"*/{CSV}"))]
    for number, rows in enumerate(tries):
        begins = [later[0][0] for later in tries[number + 1 :] if later]
        for step, figures in rows:
            if all(step < begin for begin in begins):
                for logger in loggers:
                    logger.log_metrics(figures, step=step)


def read_curves(path: Path) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield step and figures of each row."""
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            step = int(row.pop("step"))
            yield step, {name: float(value) for name, value in row.items() if value}


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(error).__name__
