"""Settings of `python -m benchmarks real-size`."""

from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.config import BenchmarkConfig
from predictors.config import require_at_least


@dataclass(frozen=True, kw_only=True)
class RealSizeConfig(BenchmarkConfig):
    work: Path = Path("runs/real-size")
    """Folder for the model, about 21 GB: written once, then verified and kept."""
    shape: Path | None = None
    """config.json of another Qwen3-MoE model, in place of Qwen3-30B-A3B's."""
    routing: Path
    """Routing log (as `collect import` reads it) that the routers choose by; the model takes as
    many experts per token as the log."""
    budget: list[str] = field(default_factory=lambda: ["2GiB", "4GiB", "8GiB"])
    """Memory for experts, with commas between the sizes."""
    system: list[str] = field(default_factory=lambda: ["on-demand", "promoe", "moecast"])
    """Systems to serve with, with commas between them."""
    prompt_tokens: int = 16
    """Random tokens of each prompt."""
    warm_up_tokens: int = 33
    """Greedy tokens of the request before the measured ones."""
    requests: int = 1
    """Measured requests of each run, one after another."""
    max_new_tokens: int = 65
    """Greedy tokens of each measured request."""
    repetitions: int = 1
    """Runs of each budget and system, in turns."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, max_new_tokens=3)
