"""Callbacks after each epoch: checkpoints and a progress line."""
# ruff: noqa: ARG002 - Lightning's hooks fix the arguments

import json
import sys
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from train.errors import TrainCheckpointError

MONITOR = "val/mean_accuracy"
"""Metric that decides which epoch is the best and when to stop."""

CHECKPOINT_FORMAT = 2
"""Part of the run record: raised when checkpoints of an older version cannot be resumed."""


class RunRecord(Callback):
    """Stores in each checkpoint what it was made from, and refuses one of another run."""

    def __init__(self, record: dict[str, Any]):
        self._record = json.loads(json.dumps({"format": CHECKPOINT_FORMAT, **record}))

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint["run_record"] = self._record

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        was = checkpoint.get("run_record", {})
        wrong = [key for key in self._record if was.get(key) != self._record[key]]
        if wrong:
            listed = ", ".join(f"{k}: {was.get(k)!r} then, {self._record[k]!r} now" for k in wrong)
            raise TrainCheckpointError(
                f"the run folder holds a checkpoint of another run ({listed}); "
                "name another run_dir, or start over with fresh=true"
            )


class BestCheckpoint(ModelCheckpoint):
    """Keeps the weights of the epoch with the best validation accuracy in `FOLDER/best.ckpt`."""

    def __init__(self, folder: Path):
        super().__init__(
            dirpath=folder,
            filename="best",
            monitor=MONITOR,
            mode="max",
            save_weights_only=True,
            save_on_train_epoch_end=True,
            enable_version_counter=False,
        )

    @property
    def path(self) -> Path:
        """The file, which exists once an epoch has ended."""
        return Path(str(self.dirpath), "best.ckpt")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # The run folder may have moved since; Lightning forgets the best score then.
        path = str(self.path)
        super().load_state_dict(
            {
                **state_dict,
                "dirpath": self.dirpath,
                "best_model_path": path,
                "kth_best_model_path": path,
                "best_k_models": {path: state_dict["best_model_score"]},
            }
        )


def last_checkpoint(folder: Path) -> ModelCheckpoint:
    """Return a callback that writes `FOLDER/last.ckpt`, to resume from, after each epoch."""
    return ModelCheckpoint(
        dirpath=folder,
        filename="last",
        save_on_train_epoch_end=True,
        enable_version_counter=False,
    )


class PlainProgress(Callback):
    """Writes a line after each epoch, for outputs that are no terminal."""

    def __init__(self) -> None:
        self._started = time.perf_counter()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        means = {
            name.removeprefix("val/mean_accuracy/"): float(value)
            for name, value in trainer.callback_metrics.items()
            if name.startswith("val/mean_accuracy/")
        }
        shown = ", ".join(f"{kind} {mean:.4f}" for kind, mean in means.items())
        seconds = time.perf_counter() - self._started
        epoch = f"epoch {trainer.current_epoch + 1} of {trainer.max_epochs}"
        sys.stderr.write(f"training: {epoch}, validation accuracy {shown} ({seconds:.0f} s)\n")
