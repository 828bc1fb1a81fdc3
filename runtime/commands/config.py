"""Options of `moecast zoo pull`."""

from dataclasses import dataclass, field

from runtime.config import SystemConfig
from zoo.config import PullConfig


@dataclass(kw_only=True)
class PullForSystemConfig(PullConfig):
    system: SystemConfig = field(default_factory=SystemConfig)
    """The system whose predictors are pulled where `name` is a model's."""


SCHEMAS: dict[str, type] = {"zoo_pull": PullForSystemConfig}
