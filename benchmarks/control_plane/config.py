"""Settings of `python -m benchmarks control-plane`."""

import os
from dataclasses import dataclass, field

from benchmarks.config import BenchmarkConfig
from predictors.config import require_at_least
from predictors.errors import MoecastError, unknown

CONTROL_PLANE_SHAPES = ("12x8", "12x60", "24x64", "48x128", "60x512")
"""Layers and experts; `benchmarks.control_plane.model` has their other sizes."""


@dataclass(frozen=True, kw_only=True)
class ControlPlaneConfig(BenchmarkConfig):
    shape: list[str] = field(default_factory=lambda: [*CONTROL_PLANE_SHAPES])
    """Layers and experts of the random models, with commas between them."""
    budget: list[str] = field(default_factory=lambda: ["100%", "25%"])
    """Memory for experts. At 100% all are there from the beginning."""
    system: list[str] = field(default_factory=lambda: ["on-demand", "promoe", "moecast"])
    """Systems to compare with plain Transformers, with commas between them."""
    repetitions: int = 5
    """Turns that each system gets, one after another."""
    steps: int = 12
    """Decode steps of a turn."""
    threads: int = field(default_factory=lambda: os.cpu_count() or 1)
    """Threads of PyTorch. With fewer than processors, predictors have a separate thread."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for shape in self.shape:
            if shape not in CONTROL_PLANE_SHAPES:
                raise MoecastError(unknown("shape", shape, CONTROL_PLANE_SHAPES))
        require_at_least(self, repetitions=3)  # of which a median is taken
