"""Training by groups of layers on several workers, with the weights of one process.

A network learns from its own loss alone, and each product over the stack belongs to one network.
So a group ends with the weights that its networks have when all are trained together, as long as it
starts from the same weights, sees the same batches and stops after the same epoch. That epoch is
known only when every group is done: each keeps the weights of every epoch.
"""
# ruff: noqa: ARG002 - Lightning's hooks fix the arguments

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor

from collect.launch.config import LauncherConfig
from collect.launch.pool import WorkerPool
from collect.launch.worker import DoUnit
from collect.recording import absolute_if_exists, absolute_path
from collect.traces import Trace
from collect.traces.column import Column
from collect.traces.manifest import hash_value
from predictors.files import write_atomic
from predictors.registry import FEED_FORWARD
from predictors.spec import ModelSpec
from runtime.commands.progress import print_line, progress
from runtime.config import ModelConfig
from train.checkpoint import from_bytes, to_bytes
from train.data import TraceBatches, TraceData, merge_inputs, pool_rows_for
from train.errors import TrainCheckpointError
from train.fit import FitSettings, Fitted, make_trainer, quiet_lightning
from train.networks import NetworkSpec, PlainStack, network_specs
from train.pipeline import make_stacks
from train.predictor_stack import PredictorStack, StackFit, validation_figures
from train.routers import RouterWeights

GROUPS_VERSION = 3
"""Part of every unit's name: raised when units come to hold other weights or other figures."""


@dataclass(frozen=True)
class LayerGroup:
    """Networks that are trained as one unit.

    `plain`: those of all plain kinds whose target is one of these layers. `residual`: the whole
    family, whose networks share the weights that embed a token.
    """

    kind: str
    first: int
    last: int
    """Target layers, both included."""

    def unit_name(
        self, trace: Trace, families: Sequence[PredictorStack], settings: FitSettings
    ) -> str:
        """Name of the unit's file: the group, and a digest of all that its weights depend on."""
        # The patience is applied when all groups are done.
        decides = {key: value for key, value in asdict(settings).items() if key != "patience"}
        digest = hash_value([GROUPS_VERSION, trace.digest, decides, self.labels(families)])
        return f"{self.kind}-layers-{self.first:02d}-{self.last:02d}-{digest[:12]}.ckpt"

    def family(self, families: Sequence[PredictorStack]) -> PredictorStack:
        """Returns the family to which the group's networks belong."""
        is_plain = self.kind == "plain"
        (family,) = (f for f in families if isinstance(f, PlainStack) == is_plain)
        return family

    def indices(self, family: PredictorStack) -> list[int]:
        """Returns the group's networks in its family's stack."""
        if not isinstance(family, PlainStack):
            return list(range(len(family.labels)))
        return [n for n, edge in enumerate(family.edges) if self.first <= edge.target <= self.last]

    def labels(self, families: Sequence[PredictorStack]) -> list[str]:
        family = self.family(families)
        return [family.labels[n] for n in self.indices(family)]


def layer_groups(spec: ModelSpec, kinds: Sequence[str], *, layers: int) -> list[LayerGroup]:
    """Returns groups that hold each learned network of these kinds once."""
    groups = []
    if "residual" in kinds:
        # The longest unit first.
        groups.append(LayerGroup("residual", 0, spec.num_layers - 1))
    plain = [kind for kind in FEED_FORWARD if kind in kinds]
    targets = {edge.target for edge in network_specs(spec, plain)} if plain else set()
    for first in range(0, spec.num_layers, layers):
        last = min(first + layers, spec.num_layers) - 1
        if targets & set(range(first, last + 1)):
            groups.append(LayerGroup("plain", first, last))
    return groups


def fit_distributed(
    trace: Trace,
    model: ModelConfig,
    families: Sequence[PredictorStack],
    settings: FitSettings,
    *,
    launcher: LauncherConfig,
    run_dir: Path,
    loggers: Sequence[Logger],
    console: Console | None = None,
    overwrite: bool = False,
) -> Fitted:
    """Trains `families`, which are as `make_stacks` makes them, group by group.

    The outcome of a group is a file of RUN_DIR/groups, named by all that decides it: a second run
    trains only missing groups. RUN_DIR must be on a disk that all workers share.

    Raises:
        LaunchError: some groups failed; the others are done and kept.
    """
    started = time.perf_counter()
    folder = run_dir / "groups"
    groups = layer_groups(trace.spec, settings.kinds, layers=launcher.layers)
    units = {group.unit_name(trace, families, settings): group for group in groups}
    if overwrite:
        for unit in units:
            (folder / unit).unlink(missing_ok=True)
    missing = [unit for unit in units if not is_trained(folder / unit)]
    launched = None
    if missing:
        needs = merge_inputs([family.needs for family in families])
        arguments = {
            "trace": absolute_path(trace.where),
            "digest": trace.digest,
            "model": {**asdict(model), "id": absolute_if_exists(model.id)},
            "settings": asdict(settings),
            "layers": launcher.layers,
            "pool_rows": pool_rows_for(trace.spec, needs, batch_size=settings.batch_size),
            "folder": str(folder.resolve()),
        }
        with (
            WorkerPool(
                launcher,
                "train.distributed:open_groups",
                arguments,
                logs=run_dir / "workers",
                name=f"train-{model.name}",
                say=(lambda _: None) if console is None else partial(print_line, console),
            ) as pool,
            progress(console, "training", total=len(missing)) as advance,
        ):
            pool.run(missing, advance=lambda _: advance(1))
            launched = pool.as_dict()
    trained = {group: read_group(folder / unit) for unit, group in units.items()}
    data = TraceData(
        trace,
        batch_size=settings.batch_size,
        seed=settings.seed,
        needs=[family.needs for family in families],
    )
    steps, best_epoch, best_accuracy = assemble(families, trained, settings, loggers)
    for family in families:
        family.eval()
        family.calibrate(data.validation())
    return Fitted(
        list(families),
        steps,
        time.perf_counter() - started,
        resumed=len(missing) < len(units),
        best_epoch=best_epoch,
        validation_accuracy=best_accuracy,
        launched=launched,
    )


def assemble(
    families: Sequence[PredictorStack],
    trained: dict[LayerGroup, dict[str, Any]],
    settings: FitSettings,
    loggers: Sequence[Logger],
) -> tuple[int, int, float | None]:
    """Gives the families the weights of the epoch that is the best of all networks together.

    Returns the steps that one process would have made, that epoch and its mean accuracy.
    """
    labels = [label for family in families for label in family.labels]
    index = {label: number for number, label in enumerate(labels)}
    steps_per_epoch = next(iter(trained.values()))["steps_per_epoch"]
    best_epoch, best_accuracy, epoch = 0, None, 0
    for epoch in range(settings.max_epochs):
        accuracy_F, loss_F = torch.empty(len(labels)), torch.empty(len(labels))
        for outcome in trained.values():
            own = [index[label] for label in outcome["labels"]]
            accuracy_F[own] = outcome["epochs"][epoch]["accuracy"]
            loss_F[own] = outcome["epochs"][epoch]["loss"]
        found = validation_figures(labels, accuracy_F, loss_F)
        figures = {key: float(value) for key, value in found.items()}
        for logger in loggers:
            step = (epoch + 1) * steps_per_epoch - 1
            logger.log_metrics({**figures, "epoch": epoch}, step=step)
        accuracy = figures["val/mean_accuracy"]
        if best_accuracy is None or accuracy > best_accuracy:
            best_epoch, best_accuracy = epoch, accuracy
        elif epoch - best_epoch >= settings.patience:
            break
    for logger in loggers:
        logger.save()
    for group, outcome in trained.items():
        weights = outcome["epochs"][best_epoch]["weights"]
        restore_group(group, families, {**weights, **outcome["buffers"]})
    return (epoch + 1) * steps_per_epoch, best_epoch, best_accuracy


def read_group(path: Path) -> dict[str, Any]:
    """Raises CheckpointError if the file is damaged."""
    return from_bytes(path.read_bytes(), what=str(path))


def is_trained(path: Path) -> bool:
    """True if the group's file is there and whole; a damaged one is trained again."""
    if not path.is_file():
        return False
    try:
        read_group(path)
    except TrainCheckpointError:
        return False
    return True


def open_groups(
    *,
    trace: str,
    digest: str,
    model: dict[str, Any],
    settings: dict[str, Any],
    layers: int,
    pool_rows: int,
    folder: str,
) -> DoUnit:
    """Entry point of a worker: opens the trace once, whose columns are mapped, not read."""
    opened = Trace.open(trace, verify=False)
    if opened.digest != digest:
        raise TrainCheckpointError(
            f"{trace} on this worker ({opened.digest[:12]}) is not the trace on which the training "
            f"was started ({digest[:12]}): name one that every worker can read"
        )
    chosen = FitSettings(**{**settings, "kinds": tuple(settings["kinds"])})

    routers = RouterWeights(ModelConfig(**model), opened.spec)

    def do(unit: str) -> None:
        # New ones for each unit: residual's networks are trained in place.
        families = make_stacks(opened, routers, chosen, chosen.kinds)
        groups = layer_groups(opened.spec, chosen.kinds, layers=layers)
        by_name = {group.unit_name(opened, families, chosen): group for group in groups}
        path = Path(folder, unit)
        if not is_trained(path):
            tree = train_group(by_name[unit], families, opened, chosen, pool_rows=pool_rows)
            write_atomic(path, to_bytes(tree))

    return do


class KeepEveryEpoch(Callback):
    """Keeps weights and accuracies of every epoch: the best one depends on the other groups."""

    def __init__(self) -> None:
        self.epochs: list[dict[str, Any]] = []

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module.accuracy_F, Tensor)
        weights = {name: p.detach().cpu().clone() for name, p in pl_module.named_parameters()}
        assert isinstance(pl_module.loss_F, Tensor)
        self.epochs.append(
            {
                "accuracy": pl_module.accuracy_F.clone(),
                "loss": pl_module.loss_F.clone(),
                "weights": weights,
            }
        )


def train_group(
    group: LayerGroup,
    families: Sequence[PredictorStack],
    trace: Trace,
    settings: FitSettings,
    *,
    pool_rows: int,
) -> dict[str, Any]:
    """Returns weights and accuracies after each epoch, as a tree of tensors for a checkpoint.

    `families` and `settings` are those of all networks; with the `pool_rows` of the run in which
    all are trained together, batches are the same.
    """
    quiet_lightning()
    family, view = own_part(group, families, trace, settings)
    data = TraceData(
        view,  # type: ignore[arg-type]
        batch_size=settings.batch_size,
        seed=settings.seed,
        needs=[family.needs],
        pool_rows=pool_rows,
    )
    first_epoch: TraceBatches = data.batches(epoch=0)
    family.normalise_by(next(iter(first_epoch)))
    module = StackFit(
        [family],
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        total_steps=settings.max_epochs * len(first_epoch),
    )
    keep = KeepEveryEpoch()
    make_trainer(settings, [keep]).fit(module, data)
    return {
        "labels": group.labels(families),
        "steps_per_epoch": len(first_epoch),
        "epochs": keep.epochs,
        "buffers": {
            name: value.cpu().clone()
            for name, value in module.cpu().named_buffers()
            if name.startswith("families.")
        },
    }


class TraceWindow:
    """Some layers of a trace, numbered from 0; no other layer is read."""

    def __init__(self, trace: Trace, first: int, last: int):
        self._trace = trace
        self._first = first
        self.spec = replace(trace.spec, num_layers=last - first + 1)
        self.request_table = trace.request_table

    def column(self, signal: str, layer: int) -> Column:
        return self._trace.column(signal, self._first + layer)

    @property
    def requests(self) -> NDArray[np.int32]:
        return self._trace.requests

    def rows(self, split: str) -> NDArray[np.int64]:
        return self._trace.rows(split)


def own_part(
    group: LayerGroup, families: Sequence[PredictorStack], trace: Trace, settings: FitSettings
) -> tuple[PredictorStack, Trace | TraceWindow]:
    """Returns a family of the group's networks alone, and the layers of the trace they read."""
    whole = group.family(families)
    if not isinstance(whole, PlainStack):
        return whole, trace
    indices = group.indices(whole)
    own = [whole.edges[n] for n in indices]
    first = min(edge.source for edge in own)
    window = TraceWindow(trace, first, max(edge.target for edge in own))
    shifted = [NetworkSpec(edge.kind, edge.source - first, edge.target - first) for edge in own]
    part = PlainStack(window.spec, shifted, width=settings.width, loss=settings.loss)
    with torch.no_grad():
        for name, value in part.stack.named_parameters():
            value.copy_(whole.stack.get_parameter(name)[indices])
    return part, window


@torch.no_grad()
def restore_group(
    group: LayerGroup, families: Sequence[PredictorStack], tensors: dict[str, Tensor]
) -> None:
    """Gives the family what the group has learned; the names of tensors are those of `StackFit`."""
    whole = group.family(families)
    indices = group.indices(whole)
    parameters = dict(whole.named_parameters())
    for name, value in tensors.items():
        own = name.removeprefix("families.0.")
        target = parameters[own] if own in parameters else whole.get_buffer(own)
        if isinstance(whole, PlainStack):
            target[indices] = value
        else:
            target.copy_(value)
