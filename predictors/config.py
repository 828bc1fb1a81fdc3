"""What every command takes, and the schemas of the `predictor` group."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(kw_only=True)
class RunConfig:
    """Base of every command's configuration."""

    run_dir: Path | None = None
    """Folder for results.json, run.json and what is made; default runs/COMMAND/TIME (UTC)."""
    debug: bool = False
    """Show tracebacks."""
    seed: int = 0
    """Seed of every random choice."""


SCHEMAS: dict[str, type] = {}
