"""Settings of `python -m benchmarks peers`."""

import os
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.config import ENVIRONMENTS, BenchmarkConfig
from predictors.errors import MoecastError


@dataclass(frozen=True, kw_only=True)
class PeersConfig(BenchmarkConfig):
    model: Path
    """Folder of a model: `python -m runtime inflate total_size=2GiB model.dtype=float32`, or
    `python -m benchmarks random`."""
    format: list[str] = field(default_factory=lambda: ["float32", "q4_0", "q4_K_M"])
    """Formats, with commas between them: float32, bfloat16, and q8_0, q4_0 and q4_K_M, in which all
    programs read one GGUF file. Others in the results stay as they are."""
    peer: list[str] = field(default_factory=list)
    """Programs and systems to run, with commas between them; all unless given."""
    budget: list[str] = field(default_factory=lambda: ["25%", "50%", "100%"])
    """Memory for experts, with commas between the sizes; a share is one of all experts in the
    format."""
    read_ahead: list[int] = field(default_factory=lambda: [128, 512])
    """KiB of the disk's read-ahead at which programs that read through the page cache run while not
    all experts fit; needs root. [] for the machine's own."""
    repetitions: int = 3
    """Runs of each peer and budget, interleaved."""
    context: int = 0
    """Random tokens before each prompt."""
    max_new_tokens: int = 24
    """Tokens to generate for each prompt."""
    seconds_per_prompt: float = 4.0
    """An answer that takes longer ends early, after three tokens or more."""
    warm_ups: int = 2
    """Prompts of 64 random tokens before the measured ones, which fill the memory."""
    threads: list[int] = field(default_factory=lambda: [os.cpu_count() or 1])
    """Threads of each program, with commas between the numbers."""
    work: Path = Path("runs/peers")
    """Folder for other layouts of the weights, scratch files, logs, and the runs of an interrupted
    command, which the same command continues."""
    environments: Path = ENVIRONMENTS
    """Folder of the environments that `python -m benchmarks environments` builds."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, values, least in (
            ("threads", self.threads, 1),
            ("read_ahead", self.read_ahead, 0),
        ):
            if any(value < least for value in values):
                raise MoecastError(f"{name}={getattr(self, name)}: must be at least {least}")
        if not self.threads:
            raise MoecastError("threads=[]: give at least one number")
