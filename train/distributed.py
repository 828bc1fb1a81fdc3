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

from collect.config import LauncherConfig
from collect.launch.pool import WorkerPool
from collect.launch.worker import DoUnit
from collect.plan import absolute_if_exists, absolute_path
from collect.traces import Trace
from collect.traces.columns import Column
from collect.traces.manifest import hash_value
from predictors.files import write_atomic
from runtime.commands.progress import print_line, progress
from runtime.config import ModelConfig
from train.checkpoint import from_bytes, to_bytes
from train.data import TraceBatches, TraceData, merge_inputs, pool_rows_for
from train.errors import TrainCheckpointError
from train.fit import FitSettings, Fitted, make_trainer, quiet_lightning, trace_data
from train.networks import NetworkSpec, PlainStack
from train.pipeline import make_stacks
from train.predictor_stack import PredictorStack, StackFit, validation_figures
from train.residual import KIND
from train.routers import RouterWeights

GROUPS_VERSION = 4
"""Part of every unit's name: raised when units come to hold other weights or other figures."""


@dataclass(frozen=True)
class LayerGroup:
    """Networks that are trained as one unit."""

    name: str
    family: PredictorStack
    """All networks of their family."""
    indices: Sequence[int]
    """Those of them that the group has."""

    @property
    def labels(self) -> list[str]:
        return [self.family.labels[n] for n in self.indices]

    def unit_name(self, trace: Trace, settings: FitSettings) -> str:
        """Name of the unit's file: the group, and a digest of all that its weights depend on."""
        # The patience is applied when all groups are done.
        decides = {key: value for key, value in asdict(settings).items() if key != "patience"}
        digest = hash_value([GROUPS_VERSION, trace.digest, decides, self.labels])
        return f"{self.name}-{digest[:12]}.ckpt"


def layer_groups(families: Sequence[PredictorStack], *, layers: int) -> list[LayerGroup]:
    """Returns groups that hold each network of the families once, the one that takes longest first.

    Those of the plain kinds are divided by their target layer. `residual` is a group: its networks
    share the weights that embed a token.
    """
    groups: list[LayerGroup] = []
    for family in families:
        if not isinstance(family, PlainStack):
            groups.insert(0, LayerGroup(KIND, family, range(len(family.labels))))
            continue
        by_part: dict[int, list[int]] = {}
        for n, edge in enumerate(family.edges):
            by_part.setdefault(edge.target // layers, []).append(n)
        for part, indices in sorted(by_part.items()):
            first, last = part * layers, (part + 1) * layers - 1
            groups.append(LayerGroup(f"plain-layers-{first:02d}-{last:02d}", family, indices))
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
    units = {
        group.unit_name(trace, settings): group
        for group in layer_groups(families, layers=launcher.layers)
    }
    if overwrite:
        for unit in units:
            (folder / unit).unlink(missing_ok=True)
    missing = [unit for unit in units if read_group(folder / unit) is None]
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
    trained = [(group, read_group(folder / unit)) for unit, group in units.items()]
    data = trace_data(trace, families, settings)
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
    trained: Sequence[tuple[LayerGroup, Any]],
    settings: FitSettings,
    loggers: Sequence[Logger],
) -> tuple[int, int, float | None]:
    """Gives the families the weights of the epoch that is the best of all networks together.

    `trained` has what each group's file holds. Returns the steps that one process would have made,
    that epoch and its mean accuracy.
    """
    labels = [label for family in families for label in family.labels]
    places = [[labels.index(label) for label in group.labels] for group, _ in trained]
    steps_per_epoch = trained[0][1]["steps_per_epoch"]
    best_epoch, best_accuracy, epoch = 0, None, 0
    for epoch in range(settings.max_epochs):
        accuracy_F, loss_F = torch.empty(len(labels)), torch.empty(len(labels))
        for own, (_, outcome) in zip(places, trained, strict=True):
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
    for group, outcome in trained:
        restore_group(group, {**outcome["epochs"][best_epoch]["weights"], **outcome["buffers"]})
    return (epoch + 1) * steps_per_epoch, best_epoch, best_accuracy


def read_group(path: Path) -> Any:
    """Returns what the file of a trained group holds; None if it is missing or damaged."""
    if not path.is_file():
        return None
    try:
        return from_bytes(path.read_bytes(), what=str(path))
    except TrainCheckpointError:
        return None


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
        if read_group(Path(folder, unit)) is not None:
            return
        # New ones for each unit: residual's networks are trained in place.
        groups = layer_groups(make_stacks(opened, routers, chosen, chosen.kinds), layers=layers)
        (group,) = (one for one in groups if one.unit_name(opened, chosen) == unit)
        tree = train_group(group, opened, chosen, pool_rows=pool_rows)
        write_atomic(Path(folder, unit), to_bytes(tree))

    return do


class KeepEveryEpoch(Callback):
    """Keeps weights and accuracies of every epoch: the best one depends on the other groups."""

    def __init__(self) -> None:
        self.epochs: list[dict[str, Any]] = []

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, StackFit)
        weights = {name: p.detach().cpu().clone() for name, p in pl_module.named_parameters()}
        accuracy_F, loss_F = pl_module.accuracy_F.clone(), pl_module.loss_F.clone()
        self.epochs.append({"accuracy": accuracy_F, "loss": loss_F, "weights": weights})


def train_group(
    group: LayerGroup, trace: Trace, settings: FitSettings, *, pool_rows: int
) -> dict[str, Any]:
    """Returns weights and accuracies after each epoch, as a tree of tensors for a checkpoint.

    `settings` are those of all networks; with the `pool_rows` of the run in which all are trained
    together, batches are the same.
    """
    quiet_lightning()
    family, view = own_part(group, trace, settings)
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
        "steps_per_epoch": len(first_epoch),
        "epochs": keep.epochs,
        "buffers": {name: value.cpu().clone() for name, value in module.cpu().named_buffers()},
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
    group: LayerGroup, trace: Trace, settings: FitSettings
) -> tuple[PredictorStack, Trace | TraceWindow]:
    """Returns a family of the group's networks alone, and the layers of the trace they read."""
    whole = group.family
    if not isinstance(whole, PlainStack):
        return whole, trace
    own = [whole.edges[n] for n in group.indices]
    first = min(edge.source for edge in own)
    window = TraceWindow(trace, first, max(edge.target for edge in own))
    shifted = [NetworkSpec(edge.kind, edge.source - first, edge.target - first) for edge in own]
    part = PlainStack(window.spec, shifted, width=settings.width, loss=settings.loss)
    with torch.no_grad():
        for name, value in part.stack.named_parameters():
            value.copy_(whole.stack.get_parameter(name)[group.indices])
    return part, window


@torch.no_grad()
def restore_group(group: LayerGroup, tensors: dict[str, Tensor]) -> None:
    """Gives the family what the group has learned; the names of tensors are those of `StackFit`."""
    whole = group.family.state_dict()
    # The state's tensors are the family's own memory.
    for name, value in tensors.items():
        target = whole[name.removeprefix("families.0.")]
        if isinstance(group.family, PlainStack):
            target[group.indices] = value
        else:
            target.copy_(value)
