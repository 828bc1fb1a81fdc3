"""What every command takes, and the schemas of the `predictor` group."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from predictors.errors import PredictorError

ALL = "all"
"""Stands for every kind there is."""

SEVERAL = "several"
"""Key of a field's metadata: its option takes several choices of the group of its name, `a,b` or
`all`; the value is what it is without an argument."""

SECRET = "secret"
"""Key of a field's metadata: what it is set to is written nowhere."""


@dataclass(kw_only=True)
class RunConfig:
    """Base of every command's configuration."""

    run_dir: Path | None = None
    """Folder for results.json, run.json and what is made; default runs/COMMAND/TIME (UTC)."""
    debug: bool = False
    """Show tracebacks."""
    seed: int = 0
    """Seed of every random choice."""


@dataclass(kw_only=True)
class PredictorConfig:
    kind: str = "stride"
    """Row of the table in predictors/registry.py, or all of them."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of that kind, such as `{capacity: 256}`: what its class takes by keyword."""
    int8: bool = False
    """Networks with eight-bit weights: a quarter of the bytes; what is scored is what ships."""
    width: int = 512
    """Hidden units of each learned network; 512 is 160,000 parameters on the reference model."""

    def __post_init__(self) -> None:
        if self.width < 1:
            raise PredictorError(f"predictor.width={self.width}: must be at least 1")


SCHEMAS: dict[str, type] = {"predictor/base": PredictorConfig}
