"""Settings of the replays of the papers' figures."""

from dataclasses import dataclass
from pathlib import Path

from benchmarks.config import BenchmarkConfig


@dataclass(frozen=True, kw_only=True)
class PapersConfig(BenchmarkConfig):
    trace: Path
    """Folder of a trace with all signals: signals=[layer_input,gate_input,gate_logits,experts,
    weights] of `python -m collect`."""
    entries: Path | None = None
    """Folder of trained entries that come before the zoo's."""
    requests: int = 300
    """Held-out requests of each replay."""
    warm_requests: int = 20
    """Training requests before them, which fill the arena and are in no figure."""
    workers: int | None = None
    """Processes that replay; default: one for each core."""


@dataclass(frozen=True, kw_only=True)
class ScalingConfig(PapersConfig):
    """`python -m benchmarks scaling` has the same options."""
