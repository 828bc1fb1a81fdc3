"""Settings of `python -m benchmarks capacity`."""

from dataclasses import dataclass
from pathlib import Path

from benchmarks.config import RESULTS, BenchmarkConfig


@dataclass(frozen=True, kw_only=True)
class CapacityConfig(BenchmarkConfig):
    output: Path = RESULTS / "capacity.json"
    repetitions: int = 3
    """Pairs of recordings, a short and a long one; the median of their differences is reported."""
    prompts: int = 24
    """Prompts of the long recording; the short one has an eighth of them."""
    replays: int = 11
    """Replays of each system in each process; the median of their times is reported."""
    replay_prompts: int = 120
    """Prompts of the recording that is replayed; a part of them is held out."""
    replay_tokens: int = 200
    """Generated held-out tokens in a replay."""
    trace_tokens: int = 10**9
    """Tokens of the planned trace."""
