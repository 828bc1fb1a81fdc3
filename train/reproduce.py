"""`moecast zoo reproduce`: repeats the training of an entry, and compares digests."""

import platform
import sys
from dataclasses import replace
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

from predictors.errors import NegativeResult
from predictors.origin import RESULT_PACKAGES, name_machine, package_versions, read_git_revision
from predictors.registry import REUSE_PREDICTORS
from train.commands import train
from train.config import ReproduceConfig, TrainConfig
from train.entry_trace import find_entry_trace
from train.errors import TrainError
from train.reuse_training import train_reuse
from zoo.commands import print_line
from zoo.commands.compare import comparison_table
from zoo.comparison import pair_metrics
from zoo.digest import hash_bytes
from zoo.entry import ZooEntry, open_entry
from zoo.load import find_entry
from zoo.training_record import TrainingRecord

TIMED = ("fetch_rate", "good_pred", "joint")
"""Metrics that depend on the latency of the predictor, as it was measured on a machine."""


class NotReproduced(NegativeResult):
    """The same training gave other weights."""


def reproduce(config: ReproduceConfig) -> dict[str, Any]:
    """Train as the entry's record says, and compare the files of the predictor.

    Raises:
        TrainError: the entry has no record, its options are not of this version, or the trace is
            another one.
        NotReproduced: files differ.
    """
    entry = find_entry(config.name)
    record = entry.training()
    if record is None:
        raise TrainError(
            f"{entry.manifest.name} has no training.json: it was made by an earlier version, which "
            "did not record how"
        )
    repeated = repeat_config(entry, record, config)
    trace = find_entry_trace(entry.manifest.name, record.trace, repeated)
    # By name: `reuse` alone needs fewer signals, and would look for a trace with those only.
    repeated = replace(repeated, trace=trace.where)
    changes = list_changes(record)
    for change in changes:
        sys.stderr.write(f"{change}: last bits may differ\n")
    command = train_reuse if entry.manifest.kind in REUSE_PREDICTORS else train
    folders = command(repeated)["entries"]
    name = entry.manifest.name.rpartition("/")[2]
    if name not in folders:
        raise TrainError(f"the training gave {', '.join(folders)}, and no {name}")
    again = open_entry(folders[name])
    digests, digests_again = payload_digests(entry), payload_digests(again)
    different = sorted(
        path
        for path in digests.keys() | digests_again.keys()
        if digests.get(path) != digests_again.get(path)
    )
    if different:
        show_metrics(entry, again)
        reason = "; ".join(changes) or "versions and machine are those of the record"
        raise NotReproduced(
            f"{entry.manifest.name}: {', '.join(different)} differ from those of the repeated "
            f"training in {again.where} ({reason})"
        )
    print_line(
        f"{entry.manifest.name}@{entry.manifest.digest[:12]} was reproduced: {len(digests)} files "
        "with equal digests"
    )
    return {"entry": entry.manifest.name, "files": digests, "changes": changes}


def repeat_config(entry: ZooEntry, record: TrainingRecord, config: ReproduceConfig) -> TrainConfig:
    """Return the recorded options, and the trace and folder of this command.

    Nothing is drawn, tracked or scored on other prompts: no weight depends on it.
    """
    own: dict[str, Any] = {
        "run_dir": config.run_dir,
        "trace": config.trace,
        "threads": record.threads,
        "score_shifted": False,
        "drift": False,
        "figures": False,
        "logger": [],
    }
    if config.model is not None:
        own["model"] = {"id": config.model}
    try:
        tree = OmegaConf.merge(OmegaConf.structured(TrainConfig), record.options, own)
        merged = OmegaConf.to_object(tree)
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        raise TrainError(
            f"training.json of {entry.manifest.name} has options of another version: {reason}. "
            f"It was made by moecast {record.versions.get('moecast')}"
        ) from error
    assert isinstance(merged, TrainConfig)
    return merged


def show_metrics(entry: ZooEntry, again: ZooEntry) -> None:
    """Print the held-out metrics of both that are the same however fast the machine is."""
    pairs = [pair for pair in pair_metrics(entry, again) if pair.name not in TIMED]
    print_line(f"A: {entry.where}\nB: {again.where}, repeated\n")
    comparison_table("held out", pairs).print(Console())


def list_changes(record: TrainingRecord) -> list[str]:
    """Return what differs between the recorded training and this machine, in words."""
    then = {
        "Python": record.python,
        "machine": record.machine,
        "code revision": record.code_revision,
        **record.versions,
    }
    now = {
        "Python": platform.python_version(),
        "machine": name_machine(),
        "code revision": read_git_revision(),
        **package_versions(RESULT_PACKAGES),
    }
    return [
        f"{name} {now.get(name)}, was {value}"
        for name, value in then.items()
        if now.get(name) != value
    ]


def payload_digests(entry: ZooEntry) -> dict[str, str]:
    """Return the SHA-256 of each file that the predictor consists of."""
    return {path: hash_bytes(data) for path, data in entry.payload().items()}
