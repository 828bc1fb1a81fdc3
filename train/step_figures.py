"""Gradient norm and throughput, as curves of the training."""
# ruff: noqa: ARG002 - Lightning's hooks fix the arguments

import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from train.data import Batch
from train.predictor_stack import is_logged_step


class StepFigures(Callback):
    """Logs `train/grad_norm` and `train/tokens_per_second` at every step that is logged.

    The norm is over all networks together; tokens are those of all devices. Validation takes no
    part in the time.
    """

    def __init__(self) -> None:
        self._since = 0.0
        self._tokens = 0

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._since, self._tokens = time.perf_counter(), 0

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        self._tokens += batch.chosen_LBK.size(1) * trainer.world_size

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Any
    ) -> None:
        if not is_logged_step(trainer):
            return
        gradients = [
            parameter.grad for parameter in pl_module.parameters() if parameter.grad is not None
        ]
        pl_module.log("train/grad_norm", torch.nn.utils.get_total_norm(gradients))
        now = time.perf_counter()
        pl_module.log("train/tokens_per_second", self._tokens / (now - self._since))
        self._since, self._tokens = now, 0
