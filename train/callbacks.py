"""What happens after each pass: a checkpoint, and a line for whoever watches."""
# ruff: noqa: ARG002 - Lightning's hooks fix the arguments

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

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


class Patience:
    """Which pass is the best by validation accuracy, and when to stop looking for a better one."""

    def __init__(self, patience: int):
        self._patience = patience
        self.best: float | None = None
        self.best_pass = 0

    def is_better(self, number: int, accuracy: float) -> bool:
        """Whether this pass is the best so far; it is then."""
        if self.best is not None and accuracy <= self.best:
            return False
        self.best, self.best_pass = accuracy, number
        return True

    def is_over(self, number: int) -> bool:
        """Whether none has been better for a while."""
        return number - self.best_pass >= self._patience


class BestPass(Callback):
    """Keeps the weights of the pass with the best validation accuracy, and stops when none has
    been better for a while. The checkpoint carries what it keeps.
    """

    def __init__(self, *, patience: int):
        self._patience = Patience(patience)
        self._weights: dict[str, Tensor] = {}

    @property
    def best(self) -> float | None:
        return self._patience.best

    @property
    def best_pass(self) -> int:
        return self._patience.best_pass

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        found = float(trainer.callback_metrics["val/mean_accuracy"])
        if self._patience.is_better(trainer.current_epoch, found):
            self._weights = {
                name: value.detach().cpu().clone() for name, value in pl_module.named_parameters()
            }
        elif self._patience.is_over(trainer.current_epoch):
            trainer.should_stop = True

    def restore(self, module: LightningModule) -> None:
        """Gives the module the weights of its best pass."""
        with torch.no_grad():
            for name, value in module.named_parameters():
                if name in self._weights:
                    value.copy_(self._weights[name])

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "best_pass": self.best_pass, "weights": self._weights}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._patience.best = state_dict["best"]
        self._patience.best_pass = state_dict["best_pass"]
        self._weights = dict(state_dict["weights"])


class EachPass(Callback):
    """Keeps the weights and the accuracies of every pass, where the best one is told later, from
    the accuracies of networks that others train; `report` is called after each pass.
    """

    def __init__(self, report: Callable[[int], None]):
        self._report = report
        self.weights: list[dict[str, Tensor]] = []
        self.accuracies: list[Tensor] = []

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module.accuracy_F, Tensor)
        self.accuracies.append(pl_module.accuracy_F.clone())
        self.weights.append(
            {name: value.detach().cpu().clone() for name, value in pl_module.named_parameters()}
        )
        self._report(1)


class PlainProgress(Callback):
    """A line after each pass, where a bar cannot be drawn."""

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
        passed = f"pass {trainer.current_epoch + 1} of {trainer.max_epochs}"
        sys.stderr.write(f"training: {passed}, validation accuracy {shown} ({seconds:.0f} s)\n")
