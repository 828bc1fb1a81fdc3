"""Options of `python -m train report`."""

from dataclasses import dataclass
from pathlib import Path

from predictors.config import RunConfig
from predictors.errors import MoecastError


@dataclass(kw_only=True)
class ReportConfig(RunConfig):
    trace: str | None = None
    """The trace that the run was trained on; where it was then unless given."""
    ceiling: Path | None = None
    """Accuracy against trace size, as `benchmarks/ceiling.py` wrote it, to be drawn too."""
    replay_tokens: int = 200
    """Generated held-out tokens to replay under each eviction policy and cache size."""

    def __post_init__(self) -> None:
        if self.replay_tokens < 1:
            raise MoecastError(f"replay_tokens={self.replay_tokens}: must be at least 1")
