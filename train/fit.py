"""Training: trace -> pool -> batch -> losses -> best epoch -> export.

1. **trace**: `find_trace.py` opens it or has it recorded; `data.py` divides its requests into those
   to fit, to validate with and to hold out (`subset_rows`).
2. **pool**: `data.py` reads blocks of rows from everywhere in it into memory (`shuffle_rows`,
   `read_pool`). `reuse` needs each row's past and future: `reuse.py`.
3. **batch**: `data.py` draws a `Batch` at random from the pool (`TraceBatches`).
4. **losses**: a family of networks has one loss for each of its networks, `losses(batch)`: in
   `networks.py` (`mlp`, `stride`, `pre-attention`: `LOSSES`), `residual.py` or `reuse.py`.
   `predictor_stack.py` has the step: their sum, the optimiser and the learning rate (`StackFit`).
5. **best epoch**: this file runs Lightning over the epochs, keeps the weights of the one with the
   best accuracy on validation requests, stops when it gets no better, and resumes from the run
   folder (`Training`). By shares of each batch in processes that Ray starts: `ray_ddp.py`.
6. **export**: a family's `export` folds its weights into ONNX graphs (`export.py`); `pipeline.py`
   compares these with torch and writes the zoo entries.

`commands.py` calls all of it in this order. To change a loss, change `losses` of one family.
"""
# ruff: noqa: ARG002 - Lightning's hooks fix the arguments

import hashlib
import logging
import signal
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    Checkpoint,
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    RichProgressBar,
)
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.environments import ClusterEnvironment, LightningEnvironment
from lightning.pytorch.strategies import Strategy
from torch import nn

from collect.traces import Trace
from train.checkpoint import SafeCheckpointIO
from train.config import TrainConfig
from train.data import EpochData, InputSpec
from train.errors import TrainCheckpointError
from train.predictor_stack import FitSettings, PredictorStack, StackFit, StepFigures

CHECKPOINTS = "checkpoints"
"""Folder of the run folder with both checkpoints."""
LAST, BEST = "last.ckpt", "best.ckpt"
"""State that a training resumes from, and the weights of the best epoch so far."""


@dataclass(frozen=True)
class Fitted:
    """The trained networks and what it took."""

    families: list[PredictorStack]
    steps: int
    seconds: float
    resumed: bool
    best_epoch: int
    """The epoch that the weights are from, counted from 0."""
    validation_accuracy: float | None
    """Mean over all networks, on training requests that were set aside."""

    def record(self, settings: FitSettings) -> dict[str, Any]:
        """Return the training's part of results.json."""
        parameters = [parameter for family in self.families for parameter in family.parameters()]
        return {
            **asdict(settings),
            "networks": sum(len(family.labels) for family in self.families),
            "parameters": sum(parameter.numel() for parameter in parameters),
            "steps": self.steps,
            "seconds": round(self.seconds, 3),
            "resumed": self.resumed,
            "best_pass": self.best_epoch,
            "validation_accuracy": self.validation_accuracy,
            "weights_digest": digest_weights(self.families),
        }


def make_settings(config: TrainConfig, kinds: tuple[str, ...]) -> FitSettings:
    """Return a run's settings for these kinds."""
    return FitSettings(
        kinds=kinds,
        width=config.predictor.width,
        loss=config.loss.value,
        max_epochs=config.max_epochs,
        batch_size=config.batch_size,
        lr=config.lr,
        weight_decay=config.weight_decay,
        seed=config.seed,
        devices=config.devices,
    )


@dataclass(frozen=True)
class Training:
    """A training of families of networks on the same tokens, with its checkpoints in a folder.

    Deterministic: the same trace, settings and number of threads give the same weights, with or
    without an interruption between two epochs.
    """

    trace: Trace
    families: Sequence[PredictorStack]
    settings: FitSettings
    folder: Path

    @cached_property
    def data(self) -> EpochData:
        """Batches of the inputs that any of the families needs."""
        needs = InputSpec(
            InputSpec().signals.union(*(family.needs.signals for family in self.families)),
            # One family has contexts, if any.
            max(family.needs.decays for family in self.families),
        )
        size, seed = self.settings.batch_size, self.settings.seed
        batches = self.families[0].batches
        return EpochData(partial(batches, self.trace, batch_size=size, seed=seed, needs=needs))

    def fit(self, loggers: Sequence[Logger], *, overwrite: bool = False) -> Fitted:
        """Train all networks together, resuming from the folder's checkpoint if there is one.

        The weights are those of the epoch with the best accuracy on requests set aside; these also
        calibrate the scores. Held-out requests are not read.

        Raises:
            TrainCheckpointError: the checkpoint is damaged or of another run.
        """
        if overwrite:
            (self.folder / LAST).unlink(missing_ok=True)
        resumed, started = (self.folder / LAST).exists(), time.perf_counter()
        if not self.run_epochs(loggers).is_global_zero:
            # Lightning runs the whole command once for each device; what follows is the first's.
            raise SystemExit(0)
        return self.take_best_epoch(started=started, resumed=resumed)

    def run_epochs(
        self,
        loggers: Sequence[Logger],
        *,
        strategy: Strategy | None = None,
        environment: ClusterEnvironment | None = None,
    ) -> Trainer:
        """Train until the last epoch or until it gets no better, and keep both checkpoints.

        `strategy` and `environment` are those of a launcher that has started this process and
        others, each of which calls this with its share of every batch.
        """
        quiet_lightning()
        settings, folder = self.settings, self.folder
        first_pass = self.data.batches(epoch=0)
        module = StackFit(
            self.families,
            settings,
            total_steps=settings.max_epochs * len(first_pass),
            trace_digest=self.trace.digest,
        )
        sample = next(iter(first_pass))
        for family in self.families:
            family.normalise_by(sample)
        # Lightning calls checkpoint callbacks last: what they save includes all states of an epoch.
        saved: dict[str, Any] = {"save_on_train_epoch_end": True, "enable_version_counter": False}
        callbacks: list[Callback] = [
            EarlyStopping(MONITOR, mode="max", patience=settings.patience),
            StayStopped(),
            BestCheckpoint(
                folder, "best", monitor=MONITOR, mode="max", save_weights_only=True, **saved
            ),
            ModelCheckpoint(folder, "last", **saved),
            RichProgressBar() if sys.stderr.isatty() else PlainProgress(),
        ]
        if loggers:
            callbacks += [LearningRateMonitor(logging_interval="step"), StepFigures()]
        trainer = Trainer(
            accelerator="auto",
            devices=settings.devices if strategy is None else "auto",
            strategy=strategy or "auto",
            precision="32-true",
            max_epochs=settings.max_epochs,
            logger=list(loggers) or False,
            log_every_n_steps=10,
            callbacks=callbacks,
            # Without one, Lightning would take a process in a Slurm job for one of the job's tasks.
            plugins=[SafeCheckpointIO(), environment or LightningEnvironment()],
            enable_model_summary=False,
            enable_progress_bar=sys.stderr.isatty(),
            num_sanity_val_steps=0,
            reload_dataloaders_every_n_epochs=1,
            use_distributed_sampler=False,
        )
        checkpoint = folder / LAST
        on_interrupt = signal.getsignal(signal.SIGINT)
        try:
            trainer.fit(
                module, self.data, ckpt_path=str(checkpoint) if checkpoint.exists() else None
            )
        except SystemExit as error:
            # Lightning turns Ctrl-C into SystemExit and switches the signal off.
            signal.signal(signal.SIGINT, on_interrupt)
            raise KeyboardInterrupt from error
        return trainer

    def take_best_epoch(self, *, started: float, resumed: bool) -> Fitted:
        """Give the families the weights of the best epoch, and calibrate their scores.

        Raises:
            TrainCheckpointError: a checkpoint is missing or damaged.
        """
        best = read_checkpoint(self.folder / BEST)
        prefix = "families."
        nn.ModuleList(self.families).load_state_dict(
            {name.removeprefix(prefix): value for name, value in best["state_dict"].items()}
        )
        for family in self.families:
            family.cpu().eval()
            family.calibrate(self.data.validation())
        last = read_checkpoint(self.folder / LAST)
        (stopping,) = (
            state for name, state in last["callbacks"].items() if name.startswith("EarlyStopping")
        )
        return Fitted(
            list(self.families),
            int(last["global_step"]),
            time.perf_counter() - started,
            resumed,
            int(best["epoch"]),
            float(stopping["best_score"]),
        )


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Raises TrainCheckpointError when the file is missing or damaged."""
    if not path.exists():
        raise TrainCheckpointError(f"{path} is missing; start over with overwrite=true")
    return SafeCheckpointIO().load_checkpoint(path)


def digest_weights(families: Sequence[PredictorStack]) -> str:
    """Return the sha256 of the weights: equal runs have equal digests."""
    digest = hashlib.sha256()
    for name, tensor in sorted(nn.ModuleList(families).state_dict().items()):
        digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def quiet_lightning() -> None:
    """Silence Lightning's remarks on devices and workers, which users cannot act on."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"lightning\..*")
    torch.set_float32_matmul_precision("highest")


MONITOR = "val/mean_accuracy"
"""Metric that decides which epoch is the best and when to stop."""


class StayStopped(Callback):
    """Runs no further epoch of a training that had stopped early, when its command is repeated.

    Lightning restores how long `EarlyStopping` has waited, not that it has ended the training. (A
    subclass of it would store its state under another name, which earlier checkpoints lack.)
    """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        stopping = trainer.early_stopping_callback
        assert stopping is not None
        trainer.should_stop = stopping.wait_count >= stopping.patience


class BestCheckpoint(ModelCheckpoint):
    """Keeps the weights of the epoch with the best validation accuracy in `FOLDER/best.ckpt`."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # The run folder may have moved since; Lightning forgets the best score then.
        path = str(Path(str(self.dirpath), BEST))
        super().load_state_dict(
            {
                **state_dict,
                "dirpath": self.dirpath,
                "best_model_path": path,
                "kth_best_model_path": path,
                "best_k_models": {path: state_dict["best_model_score"]},
            }
        )


class PlainProgress(Checkpoint):
    """Writes a line after each epoch, for outputs that are no terminal.

    It is of the callbacks that Lightning calls last, in order: an epoch that is announced as
    finished is on the disk.
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._started, self._first_epoch = time.perf_counter(), trainer.current_epoch

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        means = {
            name.removeprefix("val/mean_accuracy/"): float(value)
            for name, value in trainer.callback_metrics.items()
            if name.startswith("val/mean_accuracy/")
        }
        shown = ", ".join(f"{kind} {mean:.4f}" for kind, mean in means.items())
        seconds = time.perf_counter() - self._started
        assert trainer.max_epochs is not None
        done = trainer.current_epoch + 1
        left = seconds / (done - self._first_epoch) * (trainer.max_epochs - done)
        sys.stderr.write(
            f"training: epoch {done} of {trainer.max_epochs}, loss "
            f"{float(trainer.callback_metrics['train/loss']):.4f}, validation accuracy {shown} "
            f"({seconds:.0f} s, at most {left:.0f} s left)\n"
        )
