"""Settings of `python -m benchmarks capacity`."""

from dataclasses import dataclass
from pathlib import Path

from benchmarks.config import RESULTS, BenchmarkConfig


@dataclass(frozen=True, kw_only=True)
class CapacityConfig(BenchmarkConfig):
    output: Path = RESULTS / "capacity.json"
