"""`moecast zoo pull`: an entry by its name, or all that a system takes for a model."""

from typing import Any

from runtime.config import PullForSystemConfig
from zoo.commands.pull import pull_and_print


def run(config: PullForSystemConfig) -> dict[str, Any]:
    """Pulls one entry, or those of the kinds that the system forecasts and evicts with."""
    kinds = (config.system.predictor, config.system.reuse_predictor)
    return pull_and_print(config, bundle=list(filter(None, kinds)))
