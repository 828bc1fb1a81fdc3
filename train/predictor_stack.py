"""Networks that are trained together and exported, and the LightningModule that trains them.

Shape suffixes: L layers, F figures, B batch, E experts.
"""
# ruff: noqa: ARG002 - Lightning's hooks fix the arguments

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn

from predictors.base import Floats, Predictor, Signal
from predictors.spec import ModelSpec
from train.data import Batch, InputSpec, TraceBatches
from train.errors import TrainCheckpointError, TrainError


class ReferenceScores(NamedTuple):
    """Torch's scores of one batch, to compare with the exported predictor."""

    kind: str
    signal: Signal
    """The event at which the predictor answers."""
    source: int
    """The layer of that event."""
    scores_BE: Mapping[int, Floats]
    """By the layer that is forecast."""
    logits_BE: Floats | None = None
    """The layer's router's, for a predictor that answers when it has chosen."""


class PredictorStack(nn.Module):
    """Networks of all layers as stacked products, with one figure for each forecast."""

    labels: list[str]
    """Labels of the figures: `mlp/layer_03`, `residual/horizon_2/layer_05`."""
    needs = InputSpec()
    batches: type[TraceBatches] = TraceBatches
    """Batches that they are trained and validated on."""
    lr_share: float = 1.0
    """Its learning rate, as a share of the run's."""

    def normalise_by(self, batch: Batch) -> None:
        """Fixes the input normalisation to this sample; before training only."""
        raise NotImplementedError

    def losses(self, batch: Batch) -> Tensor:
        """`[F]`. Networks share no weights, so their sum trains each as if it were alone."""
        raise NotImplementedError

    def hits(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """`[F]` each: a sum and a count whose ratio is the accuracy of each figure."""
        raise NotImplementedError

    def calibrate(self, batches: Iterable[Batch]) -> None:
        """Fits what turns scores into probabilities, on requests that were not trained on."""

    def export(self, spec: ModelSpec) -> Mapping[str, Predictor]:
        """The run-time predictors, by kind."""
        raise NotImplementedError

    def answers(self, batch: Batch) -> Iterator[ReferenceScores]:
        """Scores of the batch's tokens as torch computes them."""
        raise NotImplementedError


WARMUP_SHARE = 0.05
"""Share of all steps with a rising learning rate, until AdamW's second moments are reliable."""


CHECKPOINT_FORMAT = 2
"""Part of the run record: raised when checkpoints of an older version cannot be resumed."""

MOST_LOSS = 2
"""Loss at an epoch's end, by the untrained networks' loss, above which a training has diverged."""


@dataclass(frozen=True, kw_only=True)
class FitSettings:
    """All settings that the trained weights depend on, besides the trace."""

    kinds: tuple[str, ...]
    width: int
    loss: str
    max_epochs: int
    batch_size: int
    lr: float
    weight_decay: float
    seed: int
    patience: int = 3
    """Epochs without a better validation accuracy after which training stops."""
    devices: int = 1


class StackFit(LightningModule):
    """Trains families of networks on the same tokens, in one step each."""

    def __init__(
        self,
        families: Sequence[PredictorStack],
        settings: FitSettings,
        *,
        total_steps: int,
        trace_digest: str,
    ):
        """Checkpoints of other settings or of another trace are refused."""
        super().__init__()
        record = {"format": CHECKPOINT_FORMAT, "trace": trace_digest, **asdict(settings)}
        self._record = json.loads(json.dumps(record))
        self.families = nn.ModuleList(families)
        self.labels = [label for family in families for label in family.labels]
        self._settings = settings
        self._total_steps = total_steps
        self._sums_3F = torch.zeros(3, len(self.labels))
        """Of the validation so far: hits, chosen experts, and losses of all tokens."""
        self._validated = 0
        self._untrained_F: Tensor | None = None
        """Losses of the first batch, before any step."""
        self._recent_F: Tensor | None = None
        """Their running mean over some ten steps."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        # The sum keeps each network's gradient what it would be if it were trained alone.
        losses_F = torch.cat([family.losses(batch) for family in self.families])
        now_F = losses_F.detach()
        self._untrained_F = now_F if self._untrained_F is None else self._untrained_F
        self._recent_F = now_F if self._recent_F is None else self._recent_F.lerp(now_F, 0.1)
        self.log("train/loss", now_F.mean(), batch_size=1, prog_bar=True)
        if is_logged_step(self.trainer):
            self.log_dict(mean_losses("train", self.labels, now_F), batch_size=1)
        return losses_F.sum()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        num_tokens = batch.chosen_LBK.size(1)
        sums = [
            torch.stack([*family.hits(batch), family.losses(batch) * num_tokens])
            for family in self.families
        ]
        self._sums_3F += torch.cat(sums, dim=1).cpu()
        self._validated += num_tokens

    def on_validation_epoch_end(self) -> None:
        # One mean over all tokens, not a mean of the batches' means.
        hits_F, wanted_F, losses_F = self._sums_3F
        accuracy_F, loss_F = hits_F / wanted_F.clamp(min=1), losses_F / max(1, self._validated)
        groups = [label.rpartition("/")[0] for label in self.labels]
        self.log_dict(
            {
                **group_means("val/accuracy", self.labels, accuracy_F),
                **group_means("val/mean_accuracy", groups, accuracy_F),
                "val/mean_accuracy": accuracy_F.mean(),
                "val/loss": loss_F.mean(),
                **mean_losses("val", self.labels, loss_F),
            }
        )
        self._sums_3F.zero_()
        self._validated = 0

    def on_train_epoch_end(self) -> None:
        # Before this epoch's checkpoints are written.
        assert self._untrained_F is not None
        recent_F = self.trainer.strategy.reduce(self._recent_F)
        recent = mean_losses("train", self.labels, recent_F)
        untrained = mean_losses("train", self.labels, self._untrained_F)
        for name, loss in recent.items():
            # A comparison with NaN is false.
            if not float(loss) <= MOST_LOSS * float(untrained[name]):
                raise TrainError(
                    f"the training diverged in epoch {self.current_epoch + 1}: {name} is "
                    f"{loss:.4g}, and was {untrained[name]:.4g} before the first step. Lower the "
                    f"learning rate (lr={self._settings.lr / 10:g}) and start over with "
                    "overwrite=true"
                )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["untrained_losses"] = self._untrained_F
        checkpoint["run_record"] = self._record

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        was = checkpoint.get("run_record", {})
        wrong = [key for key in self._record if was.get(key) != self._record[key]]
        if wrong:
            listed = ", ".join(f"{k}: {was.get(k)!r} then, {self._record[k]!r} now" for k in wrong)
            raise TrainCheckpointError(
                f"the run folder holds a checkpoint of another run ({listed}); "
                "name another run_dir, or start over with overwrite=true"
            )
        self._untrained_F = checkpoint.get("untrained_losses")

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        # Fused: one pass over memory, a sixth of the time at batches as small as ours.
        optimizer = torch.optim.AdamW(
            [
                {
                    "params": list(family.parameters()),
                    "lr": self._settings.lr * family.lr_share,
                    "name": "-".join(dict.fromkeys(map(kind_of, family.labels))),
                }
                for family in self.families
            ],
            weight_decay=self._settings.weight_decay,
            fused=True,
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self.rate)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def rate(self, step: int) -> float:
        """Return the factor on the learning rate: linear warm-up, then linear decay to zero."""
        warmup = max(1, round(WARMUP_SHARE * self._total_steps))
        left = (self._total_steps - step) / max(1, self._total_steps - warmup)
        return min(1.0, (step + 1) / warmup, max(0.0, left))


def is_logged_step(trainer: Trainer) -> bool:
    """Return whether the trainer passes this step's figures to its loggers."""
    return (trainer.global_step + 1) % trainer.log_every_n_steps == 0


def kind_of(label: str) -> str:
    """Return the kind of predictor that a figure is of."""
    return label.partition("/")[0]


def mean_losses(stage: str, labels: Sequence[str], loss_F: Tensor) -> dict[str, Tensor]:
    """Return `STAGE/loss/KIND`, the mean over each kind's networks: kinds differ in their loss."""
    return group_means(f"{stage}/loss", list(map(kind_of, labels)), loss_F)


def group_means(name: str, groups: Sequence[str], values_F: Tensor) -> dict[str, Tensor]:
    """Return `NAME/GROUP`, the mean over the figures of each group."""
    return {
        f"{name}/{group}": values_F[[f for f, own in enumerate(groups) if own == group]].mean()
        for group in dict.fromkeys(groups)
    }


class StepFigures(Callback):
    """Logs `train/grad_norm` and `train/tokens_per_second` at every step that is logged.

    The norm is over all networks together; tokens are those of all devices. Validation takes no
    part in the time.
    """

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
