"""What the zoo's commands take."""

from dataclasses import dataclass
from pathlib import Path

from omegaconf import MISSING

from predictors.config import RunConfig


@dataclass(kw_only=True)
class ListConfig(RunConfig):
    """`python -m zoo list`."""

    from_: str | None = None
    """Folder of the zoo to list; default: what was pulled, and the built-in zoo."""


@dataclass(kw_only=True)
class ShowConfig(RunConfig):
    """`python -m zoo show NAME`."""

    name: str = MISSING
    """NAME, NAME@latest, NAME@DIGEST, or an entry's folder."""


@dataclass(kw_only=True)
class VerifyConfig(RunConfig):
    """`python -m zoo verify PATH`."""

    name: str = MISSING
    """An entry's folder, or NAME, NAME@latest, NAME@DIGEST."""


@dataclass(kw_only=True)
class PullConfig(RunConfig):
    """`python -m zoo pull NAME`."""

    name: str = MISSING
    """NAME, NAME@latest or NAME@DIGEST."""
    from_: str = MISSING
    """Folder of the zoo to pull from, or `builtin`."""


@dataclass(kw_only=True)
class PushConfig(RunConfig):
    """`python -m zoo push PATH`."""

    path: Path = MISSING
    """Folder of the entry."""
    to: str | None = None
    """Folder of the zoo to publish in, or `builtin`; default: the folder of what was pulled."""
    replace: bool = False
    """Forget the entry's earlier versions."""


SCHEMAS: dict[str, type] = {
    "zoo_list": ListConfig,
    "zoo_show": ShowConfig,
    "zoo_verify": VerifyConfig,
    "zoo_pull": PullConfig,
    "zoo_push": PushConfig,
}
