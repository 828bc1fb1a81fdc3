"""What happens after each pass: a checkpoint, and a line for whoever watches."""
# ruff: noqa: ARG002 - Lightning's hooks fix the arguments

import json
import sys
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from train.errors import CheckpointError


class RunRecord(Callback):
    """Stores in each checkpoint what it was made from, and refuses one of another run."""

    def __init__(self, record: dict[str, Any]):
        self._record = json.loads(json.dumps(record))

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
            raise CheckpointError(
                f"the run folder holds a checkpoint of another run ({listed}); "
                "name another run_dir, or begin again with fresh=true"
            )


class SaveEachEpoch(Callback):
    """One checkpoint after each pass, when its validation is done."""

    def __init__(self, path: Path):
        self._path = path

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.save_checkpoint(self._path)


class PlainProgress(Callback):
    """A line after each pass, where a bar cannot be drawn."""

    def __init__(self) -> None:
        self._started = time.perf_counter()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        means = {
            name.rpartition("/")[2]: float(value)
            for name, value in trainer.callback_metrics.items()
            if name.startswith("val/accuracy/") and name.count("/") == 2
        }
        shown = ", ".join(f"{kind} {mean:.4f}" for kind, mean in means.items())
        seconds = time.perf_counter() - self._started
        passed = f"pass {trainer.current_epoch + 1} of {trainer.max_epochs}"
        sys.stderr.write(f"training: {passed}, held-out accuracy {shown} ({seconds:.0f} s)\n")
