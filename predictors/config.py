"""Options of every command, and the schemas of the `predictor` group."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from predictors.errors import PredictorError

ALL = "all"
"""Stands for every kind."""

SEVERAL = "several"
"""Key of a field's metadata: the option takes several choices of the group of its name, `a,b` or
`all`; the value is its default."""

SECRET = "secret"
"""Key of a field's metadata: the option's value must not be written to a file or log."""


@dataclass(kw_only=True)
class RunConfig:
    """Base of every command's configuration."""

    run_dir: Path | None = None
    """Folder for results.json, run.json and other output; default: runs/COMMAND/TIME (UTC)."""
    debug: bool = False
    """Print tracebacks of errors."""
    seed: int = 0
    """Seed of every random choice."""


@dataclass(kw_only=True)
class PredictorConfig:
    kind: str = "residual"
    """Kind of predictor (see predictors/registry.py), or all."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of that kind, such as `{capacity: 256}`: keyword arguments of its class."""
    int8: bool = True
    """Export networks with int8 weights, a quarter of float32's bytes to read at a forecast, for
    about .001 of accuracy; metrics are of the export."""
    width: int = 512
    """Hidden units of each learned network; 512 is 160,000 parameters on the reference model."""

    def __post_init__(self) -> None:
        if self.width < 1:
            raise PredictorError(f"predictor.width={self.width}: must be at least 1")


SCHEMAS: dict[str, type] = {"predictor/base": PredictorConfig}
