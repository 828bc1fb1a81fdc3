"""Training by groups of layers on several workers: the weights are those of one process."""

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.loggers import Logger
from rich.console import Console

from collect.launch.config import LauncherConfig
from collect.launch.crews import dispatcher_for
from collect.launch.task import Report, Work
from collect.order import whole_if_here, whole_path
from collect.progress import progress
from collect.traces import Trace
from collect.traces.manifest import digest_of
from predictors.files import write_atomic
from runtime.config import ModelConfig
from train.callbacks import Patience
from train.checkpoint import from_bytes, to_bytes
from train.data import TraceData, rows_of_pool, together
from train.errors import CheckpointError
from train.family import Family
from train.fit import FitSettings, Fitted
from train.groups import Group, groups_of, own_labels, put_back, train_group
from train.module import accuracies
from train.pipeline import families_for

GROUPS_VERSION = 1
"""Part of every unit's name: raised when the same settings come to train other weights."""


def fit_launched(
    trace: Trace,
    model: ModelConfig,
    families: Sequence[Family],
    settings: FitSettings,
    *,
    launcher: LauncherConfig,
    run_dir: Path,
    logger: Logger,
    console: Console | None = None,
    fresh: bool = False,
) -> Fitted:
    """Trains `families`, which are as `families_for` makes them, group by group.

    What a group has learned is a file of RUN_DIR/groups, named by all that decides it: a second run
    trains only those that are not there. RUN_DIR must be on a disk that all workers share.

    Raises:
        LaunchError: some groups failed; the others are done and kept.
    """
    started = time.perf_counter()
    folder = run_dir / "groups"
    groups = groups_of(trace.spec, settings.kinds, layers=launcher.layers)
    units = {unit_name(one, trace, families, settings): one for one in groups}
    if fresh:
        for unit in units:
            (folder / unit).unlink(missing_ok=True)
    missing = [unit for unit in units if not is_there(folder / unit)]
    launched = None
    if missing:
        needs = together([family.needs for family in families])
        arguments = {
            "trace": whole_path(trace.where),
            "digest": trace.digest,
            "model": {**asdict(model), "id": whole_if_here(model.id)},
            "settings": asdict(settings),
            "layers": launcher.layers,
            "pool_rows": rows_of_pool(trace.spec, needs, batch_size=settings.batch_size),
            "folder": str(folder.resolve()),
        }
        tell = None if console is None else console.print
        entry = "train.launching:open_groups"
        logs = run_dir / "workers"
        with dispatcher_for(launcher, entry, arguments, folder=logs, tell=tell) as dispatcher:
            dispatcher.begin()
            passes = settings.max_epochs
            with progress(console, "trained", "passes", total=passes * len(missing)) as advance:
                outcome = dispatcher.run(missing, advance=advance, amounts=[passes] * len(missing))
        outcome.require_all("groups of networks")
        launched = outcome.as_dict()
    learned = {one: read_group(folder / unit) for unit, one in units.items()}
    data = TraceData(
        trace,
        batch_size=settings.batch_size,
        seed=settings.seed,
        needs=[family.needs for family in families],
    )
    steps, patience = assemble(families, learned, settings, logger)
    for family in families:
        family.eval()
        family.calibrate(data.validation())
    seconds = time.perf_counter() - started
    return Fitted(
        list(families),
        steps,
        seconds,
        resumed=len(missing) < len(units),
        best_pass=patience.best_pass,
        validation_accuracy=patience.best,
        launched=launched,
    )


def assemble(
    families: Sequence[Family],
    learned: dict[Group, dict[str, Any]],
    settings: FitSettings,
    logger: Logger,
) -> tuple[int, Patience]:
    """Gives the families the weights of the pass that is the best of all networks together, as
    `train.callbacks.BestPass` finds it; returns the steps that one process would have made.
    """
    patience = Patience(settings.patience)
    labels = [label for family in families for label in family.labels]
    place = {label: number for number, label in enumerate(labels)}
    number = 0
    per_pass = next(iter(learned.values()))["steps_per_pass"]
    for number in range(settings.max_epochs):
        accuracy_F = torch.empty(len(labels))
        for one in learned.values():
            mine = [place[label] for label in one["labels"]]
            accuracy_F[mine] = one["passes"][number]["accuracy"]
        figures = {key: float(value) for key, value in accuracies(labels, accuracy_F).items()}
        logger.log_metrics({**figures, "epoch": number}, step=(number + 1) * per_pass - 1)
        if not patience.is_better(number, figures["val/mean_accuracy"]) and patience.is_over(
            number
        ):
            break
    logger.save()
    for group, one in learned.items():
        weights = one["passes"][patience.best_pass]["weights"]
        put_back(group, families, weights, one["buffers"])
    return (number + 1) * per_pass, patience


def unit_name(group: Group, trace: Trace, families: Sequence[Family], settings: FitSettings) -> str:
    """Of the task and of its file: the group, and a digest of all that decides its weights."""
    # How long to wait for a better pass is decided when all are done.
    decides = {key: value for key, value in asdict(settings).items() if key != "patience"}
    labels = own_labels(group, families)
    digest = digest_of([GROUPS_VERSION, trace.digest, decides, labels])
    return f"{group.name}-{digest[:12]}.ckpt"


def read_group(path: Path) -> dict[str, Any]:
    """CheckpointError when it is not what was written."""
    return from_bytes(path.read_bytes(), what=str(path))


def is_there(path: Path) -> bool:
    """Whether the group was trained before; a damaged file is trained again."""
    if not path.is_file():
        return False
    try:
        read_group(path)
    except CheckpointError:
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
) -> Work:
    """A worker's side: the trace is opened once, its columns are mapped, not read."""
    opened = Trace.open(trace, verify=False)
    if opened.digest != digest:
        raise CheckpointError(
            f"{trace} is another trace here ({opened.digest[:12]}) than where the training was "
            f"started ({digest[:12]}): name one that every worker sees"
        )
    chosen = FitSettings(**{**settings, "kinds": tuple(settings["kinds"])})
    home = Path(folder)

    def do(unit: str, report: Report) -> None:
        # Made anew for each: residual's networks are trained in place.
        families = families_for(opened, ModelConfig(**model), chosen, chosen.kinds)
        groups = groups_of(opened.spec, chosen.kinds, layers=layers)
        named = {unit_name(one, opened, families, chosen): one for one in groups}
        if is_there(home / unit):
            return
        tree = train_group(
            named[unit], families, opened, chosen, pool_rows=pool_rows, report=report
        )
        write_atomic(home / unit, to_bytes(tree))

    return Work(do)
