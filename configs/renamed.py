"""User-visible names that changed: an old name gives an error that names the new one.

To rename an option, choice or command, add a line: OPTIONS[ROOT or EVERY]["old.dotted.key"] =
"new.dotted.key" (ROOT is the stem of configs/ROOT.yaml), CHOICES["dotted.key or group"]["old"] =
"new", COMMANDS["program"]["old"] = "new". A value with a space is a sentence that says what to do.
"""

from collections.abc import Mapping

EVERY = "*"
"""Stands for every root configuration."""

SYSTEM_KEYS = ("system", "baseline", "ablated")
"""Keys that hold a `SystemConfig`."""

SYSTEM = {
    "urgency": "priority",
    "reach": "lookahead_layers",
    "fill_idle": "idle_prefetch",
    "governed": "adaptive",
    "keeper": "reuse_predictor",
}
"""Fields of `SystemConfig`."""

NO_PREDICTOR_PRIORITY = (
    "removed; system.priority=probability orders forecasts without the layer's distance"
)

OPTIONS: Mapping[str, Mapping[str, str]] = {
    EVERY: {
        "launcher.minutes": "set launcher.options={timeout_min: MINUTES}",
        "launcher.memory_gib": "set launcher.options={mem_gb: GIB}",
        "launcher.folder": "logs are in RUN_DIR/workers: set run_dir=FOLDER",
        "launcher.address": "launcher.ray_address",
        "model.onednn": "model.decode_kernels=library in place of always, own of several-tokens",
        "data.new_tokens": "data.max_new_tokens",
        "shifted.new_tokens": "shifted.max_new_tokens",
    }
    | {f"{key}.{old}": f"{key}.{new}" for key in SYSTEM_KEYS for old, new in SYSTEM.items()}
    | {
        f"{key}.{old}": NO_PREDICTOR_PRIORITY
        for key in SYSTEM_KEYS
        for old in ("predictor_priority", "predictors_order")
    },
    "collect": {
        "num_workers": "launcher.workers",
        "worker": "workers are started by launcher.workers=N, on any machine by launcher=slurm",
    },
    "batch": {
        "measure_again": "removed; delete the folder `measured` of the cache (MOECAST_CACHE)",
    },
    "bench": {"batch": "batch_size"},
    "doctor": {"budgets": "budget"},
    "evaluate": {
        "batch": "batch_size",
        "bound": "removed; the bound is computed for every replay, and system=oracle is a system",
        "fresh": "overwrite",
        "new_tokens": "replay_tokens",
    },
    "train": {
        "fresh": "overwrite",
        "logger.kind": "logger",
        "logger.project": "wandb.project",
        "logger.run_name": "wandb.name",
    },
    "verify": {"budgets": "budget"},
    "zoo_push": {"to": "zoo"},
    "serve": {
        "cluster": "ray_address",
        "key": "api_key",
    }
    | {
        name: "removed; Ray Serve's own router distributes the requests, so leave it out"
        for name in ("routing", "forecaster")
    },
}
CHOICES: Mapping[str, Mapping[str, str]] = {}
COMMANDS: Mapping[str, Mapping[str, str]] = {}


def explain_option(root: str, key: str) -> str | None:
    """Returns the message for an option's old name; None if the name was never used."""
    table = {**OPTIONS.get(EVERY, {}), **OPTIONS.get(root, {})}
    return _explain("option", key, table)


def explain_choice(key: str, choice: str) -> str | None:
    return _explain(key, choice, CHOICES.get(key, {}))


def explain_command(program: str, name: str) -> str | None:
    return _explain("command", name, COMMANDS.get(program, {}))


def _explain(kind: str, old: str, table: Mapping[str, str]) -> str | None:
    new = table.get(old)
    if new is None:
        return None
    return f"{kind} {old!r}: {new}" if " " in new else f"{kind} {old!r} is now {new!r}"
