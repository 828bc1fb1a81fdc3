"""The record of a training for its entries, without folders of the machine and without secrets."""

import platform
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from collect.config import SourceKind
from collect.traces import Trace
from predictors.origin import RESULT_PACKAGES, name_machine, package_versions, read_git_revision
from runtime.tools.report.provenance import read_provenance
from train.config import TrainConfig

DESTINATIONS = ("run_dir", "debug", "overwrite", "figures", "logger", "launcher")
"""Options that no result depends on: where it goes, and which processes make it."""
SCORING = ("other_kinds", "zoo")
"""Options that no weight depends on, and that name folders of the machine."""
LOGIN = re.compile(r"(?<=://)[^/\s]+@")
"""User name and password of an address, up to its last `@`: a password may contain one."""


def record_training(config: TrainConfig, trace: Trace) -> dict[str, Any]:
    """Returns what repeats this training: options, trace, seed, code and versions.

    `options` are plain values that compose to the same configuration. `command` is None if the
    training was called from Python, `code_revision` for an installed package. Another number of
    `threads` may change the last bits of a sum. `trace.was_named` tells whether the command named a
    finished trace; otherwise it recorded one from `options.data`.
    """
    origin = None if config.run_dir is None else read_provenance(config.run_dir)
    plan, data = trace.manifest.plan, config.data
    is_hub = config.trace is None and data.kind is SourceKind.HUB
    return {
        "format_version": 1,
        "command": None if origin is None else LOGIN.sub("", origin.command),
        "options": {
            key: hide_place(value)
            for key, value in asdict(config).items()
            if key not in (*DESTINATIONS, *SCORING)
        },
        "seed": config.seed,
        "threads": torch.get_num_threads(),
        "code_revision": read_git_revision(),
        "versions": package_versions(RESULT_PACKAGES),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": name_machine(),
        "trace": {
            "digest": trace.digest,
            "dataset": plan.dataset,
            "hub_dataset": data.path if is_hub else None,
            "hub_revision": data.revision if is_hub else None,
            "signals": list(plan.signals),
            "num_tokens": trace.num_tokens,
            "prompts_digest": plan.prompts_digest,
            "recording": plan.settings,
            "was_named": config.trace is not None,
        },
    }


def hide_place(value: Any) -> Any:
    """Returns a tree with the last part of each absolute path, and addresses without logins."""
    if isinstance(value, dict):
        return {key: hide_place(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [hide_place(part) for part in value]
    if isinstance(value, Path):
        value = str(value)
    if isinstance(value, str):
        if value.startswith(("/", "~")):
            return Path(value).name
        return LOGIN.sub("", value)
    return value
