"""Options of `moecast evaluate`."""

from dataclasses import dataclass, field
from pathlib import Path

from predictors.config import chosen, require_at_least, several
from predictors.errors import MoecastError
from runtime.config import HardwareConfig, SystemConfig
from runtime.store.model_source import resolve
from train.config import TracedConfig

OURS = "moecast"
"""The system whose rank in every condition is reported."""


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(TracedConfig):
    system: list[SystemConfig] = several("system")
    """Systems to compare; the baseline is always among them."""
    hardware: list[HardwareConfig] = several("hardware", "rtx4090-pcie4,desktop-nvme4")
    """Machines to simulate."""
    baseline: SystemConfig = chosen(SystemConfig, "system", "on-demand")
    """The system without prefetching that speed-ups are against, at equal budget."""
    budget: list[str] = field(default_factory=lambda: ["10%", "25%", "50%", "75%"])
    """Memory for experts: sizes, or shares of all experts."""
    batch_size: list[int] = field(default_factory=lambda: [1, 2, 4, 8])
    """Requests that decode together."""
    predictor: str | None = None
    """Kind, zoo entry or folder, in place of what each system names; or a run folder, as for
    `entries`."""
    entries: Path | None = None
    """Run folder of `moecast train`, or a folder with an entry for each kind; looked at before the
    zoo."""
    replay_tokens: int = 500
    """Generated held-out tokens to replay, in whole requests."""
    figures: bool = True
    """Write report.html, whose figures need further replays."""
    workers: int | None = None
    """Processes that replay; default: one for each core."""
    overwrite: bool = False
    """Replay all conditions, even those whose results are in the run folder."""

    def __post_init__(self) -> None:
        require_at_least(self, replay_tokens=1, workers=1)
        if not self.budget or not self.batch_size:
            raise MoecastError(
                "budget and batch_size must name at least one value, as in budget=25%"
            )
        if min(self.batch_size) < 1:
            raise MoecastError(f"batch_size={min(self.batch_size)}: must be at least 1")
        if self.baseline.prefetch:
            raise MoecastError(
                f"baseline={self.baseline.name} prefetches: name a system that does not, such as "
                "baseline=on-demand"
            )

    @property
    def batches(self) -> list[int]:
        return sorted(set(self.batch_size))


def check_model(config: EvaluateConfig) -> None:
    """Refuses a model that cannot be served, before heavy imports.

    Raises:
        CheckpointError: it is needed to record the trace, and cannot be served.
    """
    if config.trace is None:
        resolve(config.model)
