"""The entries that `moecast train zoo=ZOO` scores anew, in place of training."""

from collect.traces import Trace
from train.config import TrainConfig
from train.errors import TrainError
from zoo.catalog import Zoo
from zoo.entry import ZooEntry
from zoo.manifest import name_entry


def open_published(config: TrainConfig, trace: Trace, *kinds: str) -> dict[str, ZooEntry]:
    """Return the model's entries in the configured zoo by their predictors, if there is a zoo.

    Raises TrainError if one of `kinds` is not there, or nothing is, and if an entry has learned
    from another trace: requests that are held out of this one may be among those.
    """
    found: dict[str, ZooEntry] = {}
    if config.zoo is None:
        return found
    for name, entry in Zoo.at(config.zoo).entries().items():
        predictor = name.rpartition("/")[2]
        if name != name_entry(config.model.name, predictor):
            continue
        if entry.manifest.trace_digest != trace.digest:
            raise TrainError(
                f"{name} in zoo={config.zoo} was trained on another trace than {trace.where}, "
                f"{entry.manifest.trace_digest}: name that; `moecast zoo score` takes any"
            )
        found[predictor] = entry
    if not found or not found.keys() >= set(kinds):
        wanted = ", ".join(kinds) or "entry"
        raise TrainError(f"zoo={config.zoo} has no {wanted} of model={config.model.name}")
    return found
