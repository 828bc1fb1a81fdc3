"""`moecast zoo pull`: an entry by its name, or all that a system takes for a model."""

from typing import Any

from runtime.commands.config import PullForSystemConfig
from zoo.commands.pull import pull


def run(config: PullForSystemConfig) -> dict[str, Any]:
    """Pulls one entry, or those of the kinds that the system forecasts and evicts with."""
    system = config.system
    return pull(config, bundle=list(filter(None, (system.predictor, system.reuse_predictor))))
