"""Options of `moecast zoo pull`."""

from dataclasses import dataclass

from predictors.config import chosen
from runtime.config import SystemConfig
from zoo.config import PullConfig


@dataclass(frozen=True, kw_only=True)
class PullForSystemConfig(PullConfig):
    system: SystemConfig = chosen(SystemConfig, "system", "moecast")
    """The system whose predictors are pulled where `name` is a model's."""
