"""Settings of `python -m benchmarks klotski`."""

import os
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.config import BenchmarkConfig


@dataclass(frozen=True, kw_only=True)
class KlotskiConfig(BenchmarkConfig):
    model: Path
    """Folder of a model: `python -m runtime inflate total_size=2GiB model.dtype=float32`."""
    trace: Path
    """Folder of a trace, to simulate and to measure quality on."""
    budget: str = "25%"
    """Memory for experts."""
    batch_size: int = 16
    """Requests of a batch, in the ablation."""
    n: int = 8
    """Batches of a group, in the ablation."""
    sizes: list[int] = field(default_factory=lambda: [4, 16])
    """Batch sizes of figure 14, with commas between them."""
    groups: list[int] = field(default_factory=lambda: [1, 2, 4, 8])
    """Batches of a group of figure 14, with commas between them."""
    prompt_tokens: int = 16
    """Tokens of each prompt."""
    max_new_tokens: int = 12
    """Tokens to generate for each prompt."""
    repetitions: int = 1
    """Runs of each variant, interleaved."""
    threads: int = field(default_factory=lambda: os.cpu_count() or 1)
    """Threads of PyTorch."""
