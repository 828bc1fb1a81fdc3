"""The trace that an entry was trained on: found by its digest, recorded again, or asked for."""

import logging
import shlex
from dataclasses import asdict, fields, replace
from typing import Any

from rich.console import Console

from collect.config import DataConfig, SourceKind
from collect.errors import TraceError
from collect.plan import RecordingSettings
from collect.record import collect
from collect.recording import default_folder, recording_settings
from collect.traces import Trace, TraceSignal
from collect.traces.manifest import MANIFEST, read_manifest
from predictors.files import expand_home, path_exists
from runtime.presets import describe_choice
from train.config import TrainConfig
from train.errors import TrainError
from train.find_trace import find_trace
from zoo.training_record import TrainingTrace

log = logging.getLogger(__name__)

RECORDING_OPTIONS = {
    "new_tokens": "data.max_new_tokens",
    "max_prompt_tokens": "data.max_prompt_tokens",
    "chat": "data.chat",
}
"""Options of `moecast collect` by the recording setting, where the names differ."""
SHARD_BYTES = "shard_bytes"


def find_entry_trace(name: str, recorded: TrainingTrace, config: TrainConfig) -> Trace:
    """Return the trace that the entry was trained on.

    It is the one that `config` names, or one of this model in runs/traces, or else it is recorded
    from the same prompts.

    Raises:
        TrainError: the trace has another digest, or cannot be recorded without its prompts; the
            message has the command.
        TraceError, PromptError, DiskSpaceError, CheckpointError: as `find_trace`.
    """
    signals = tuple(map(TraceSignal, recorded.signals))
    made_from = f"{recorded.num_tokens:,} tokens of {recorded.dataset}"
    if config.trace is None:
        config = replace(config, trace=find_recorded(config, recorded, signals))
    if config.trace is None and (recorded.was_named or not has_prompts(config.data)):
        raise TrainError(
            f"{name} was trained on the trace {recorded.digest[:12]} ({made_from}), which is not "
            f"in runs/traces: give it with trace=PATH. From the same source, this makes it: "
            f"{collect_command(config, recorded)}"
        )
    if config.trace is None:
        settings = recording_settings(config.data, seed=config.seed)
        # Not `find_trace`: a trace of the same prompts with further signals has another digest.
        trace = collect(
            config.model,
            config.data,
            folder=default_folder(config.model, config.data, signals=signals, settings=settings),
            signals=signals,
            settings=settings,
            console=Console(stderr=True),
        )
    else:
        trace = find_trace(config, signals)
    if trace.digest != recorded.digest:
        raise TrainError(
            f"{name} was trained on the trace {recorded.digest[:12]} ({made_from}), and "
            f"{trace.where} is {trace.digest[:12]}: it has other prompts or settings, or the last "
            "bits of its states are those of other versions or another machine. trace=PATH names "
            f"another trace; this makes one: {collect_command(config, recorded)}"
        )
    return trace


def find_recorded(
    config: TrainConfig, recorded: TrainingTrace, signals: tuple[TraceSignal, ...]
) -> str | None:
    """Return the folder of the finished trace with this digest among those of the model."""
    settings = recording_settings(config.data, seed=config.seed)
    expected = default_folder(config.model, config.data, signals=signals, settings=settings)
    for path in sorted(expected.parent.glob(f"*/{MANIFEST}")):
        try:
            manifest = read_manifest(path.parent)
        except TraceError as error:
            log.warning("%s", error)
            continue
        if manifest.complete and manifest.digest == recorded.digest:
            return str(path.parent)
    return None


def has_prompts(data: DataConfig) -> bool:
    """Return whether prompts can be read: records have no folders, so a local file may not be."""
    if data.kind not in (SourceKind.JSONL, SourceKind.TEXT):
        return True
    return data.path is not None and path_exists(expand_home(data.path))


def collect_command(config: TrainConfig, recorded: TrainingTrace) -> str:
    """Return the command that makes the same trace where its prompts, or its routing log, are.

    Of a trace that the training was given, the record has the name of the prompts only.
    """
    usual = {field.name: field.default for field in fields(RecordingSettings)}
    if not recorded.recording.keys() <= usual.keys():
        return "moecast collect import source=FILE"
    arguments = ["moecast", "collect", *describe_choice(config.model).split()]
    if recorded.was_named:
        arguments.append(f"data={recorded.dataset}")
    else:
        arguments += [f"data={config.data.kind.value}", *data_options(config.data)]
    for setting, value in recorded.recording.items():
        if value == usual.get(setting):
            continue
        if setting == SHARD_BYTES and isinstance(value, int):
            arguments.append(f"shard_mib={value >> 20}")
        else:
            arguments.append(f"{RECORDING_OPTIONS.get(setting, setting)}={option_text(value)}")
    arguments.append(f"signals={option_text(list(recorded.signals))}")
    return shlex.join(arguments)


def data_options(data: DataConfig) -> list[str]:
    """Return the options that choose prompts; lengths and the template are of the recording."""
    usual = asdict(DataConfig(name=data.kind.value, kind=data.kind))
    return [
        f"data.{name}={option_text(value)}"
        for name, value in asdict(data).items()
        if value != usual[name] and f"data.{name}" not in RECORDING_OPTIONS.values()
    ]


def option_text(value: Any) -> str:
    """Return a value as the command line takes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    return str(value)
