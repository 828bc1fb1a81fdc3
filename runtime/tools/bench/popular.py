"""What a static cache holds: what training text used most, from the zoo's popularity entry."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from runtime.config import ModelConfig, SystemConfig
from runtime.engine.forecasters import reference
from runtime.store.model_source import identity, resolve

PARTS = 1_000_000
"""Shares as whole numbers, which `static` counts in."""


def needs_counts(system: SystemConfig) -> bool:
    """Whether it would otherwise have to learn its fixed set while it is measured."""
    options = system.eviction_options
    return system.eviction == "static" and not (
        options.get("counts") or options.get("first_layers")
    )


def with_counts(system: SystemConfig, model: ModelConfig, entries: Path | None) -> SystemConfig:
    """A static system that knows its set from the start.

    The same system where it needs no counts, or no entry has them.

    Raises:
        ZooError: the entry is damaged.
    """
    if not needs_counts(system):
        return system
    from zoo.load import load_predictor

    names = [model.name, identity(resolve(model), model)["model_id"]]
    where, found = reference("popularity", names, entries=entries)
    if not found:
        return system
    popularity = load_predictor(where, spec=None, options={"ahead": None})
    token = np.zeros(1, dtype=np.int64)
    shares_LE = np.stack([one.scores_TE[0] for one in popularity.begin_step(token, token)])
    counts = np.rint(PARTS * shares_LE).astype(int).tolist()
    return replace(system, eviction_options={**system.eviction_options, "counts": counts})
