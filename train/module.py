"""The LightningModule: every network of every layer learns in the same step."""

from collections.abc import Sequence

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor

from predictors.spec import ModelSpec
from train.data import Batch
from train.networks import Edge, NetworkStack, chosen_loss, listwise_loss, top_k_hits

LOSSES = {"bce": chosen_loss, "listwise": listwise_loss}
WARMUP_SHARE = 0.05
"""Of all steps; AdamW's second moments are worth little before."""


class StackFit(LightningModule):
    """Trains a NetworkStack on gate inputs and what the routers chose."""

    def __init__(
        self,
        spec: ModelSpec,
        edges: Sequence[Edge],
        *,
        width: int,
        lr: float,
        weight_decay: float,
        loss: str,
        total_steps: int,
    ):
        super().__init__()
        self.edges = list(edges)
        self.stack = NetworkStack(len(self.edges), spec, width=width)
        self._sources = [edge.source for edge in self.edges]
        self._targets = [edge.target for edge in self.edges]
        self._lr, self._weight_decay = lr, weight_decay
        self._loss = LOSSES[loss]
        self._total_steps = total_steps
        self._hits_N = torch.zeros(len(self.edges), dtype=torch.int64)
        self._wanted = 0

    def normalise_by(self, batch: Batch) -> None:
        """Fixes the input normalisation of every network; before training only."""
        self.stack.normalise_by(batch.hidden_LBD[self._sources])

    def _logits_and_chosen(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return self.stack(batch.hidden_LBD[self._sources]), batch.chosen_LBK[self._targets]

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:  # noqa: ARG002
        # The sum keeps each network's gradient what it would be if it were trained alone.
        losses_N = self._loss(*self._logits_and_chosen(batch))
        self.log("train/loss", losses_N.detach().mean(), batch_size=1)
        return losses_N.sum()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:  # noqa: ARG002
        logits_NBE, chosen_NBK = self._logits_and_chosen(batch)
        self._hits_N += top_k_hits(logits_NBE, chosen_NBK).cpu()
        self._wanted += chosen_NBK[0].numel()

    def on_validation_epoch_end(self) -> None:
        # One mean over all held-out tokens, not a mean of the batches' means.
        accuracy_N = self._hits_N / max(1, self._wanted)
        for edge, accuracy in zip(self.edges, accuracy_N, strict=True):
            self.log(f"val/accuracy/{edge.label}", accuracy)
        for kind in dict.fromkeys(edge.kind for edge in self.edges):
            mine = [n for n, edge in enumerate(self.edges) if edge.kind == kind]
            self.log(f"val/accuracy/{kind}", accuracy_N[mine].mean())
        self._hits_N.zero_()
        self._wanted = 0

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        # Fused: one pass over memory, a sixth of the time at batches as small as ours.
        optimizer = torch.optim.AdamW(
            self.stack.parameters(), lr=self._lr, weight_decay=self._weight_decay, fused=True
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self.rate)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def rate(self, step: int) -> float:
        """Factor on the learning rate: linear warm-up, then linear decay to zero."""
        warmup = max(1, round(WARMUP_SHARE * self._total_steps))
        left = (self._total_steps - step) / max(1, self._total_steps - warmup)
        return min(1.0, (step + 1) / warmup, max(0.0, left))
