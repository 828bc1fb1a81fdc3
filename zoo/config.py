"""What the zoo's commands take.

A place is a folder, `builtin`, https://, s3://, hf:// or package://; several are separated by
commas.
"""

from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import MISSING

from predictors.config import RunConfig
from predictors.errors import MoecastError


@dataclass(kw_only=True)
class ListConfig(RunConfig):
    """`python -m zoo list`."""

    zoo: str | None = None
    """Places to list; default: what was pulled, the built-in zoo, and those of MOECAST_ZOO."""
    model: str | None = None
    """Only predictors of this model: part of its name or id, or a pattern such as qwen*."""
    predictor: str | None = None
    """Only this kind, such as stride."""
    metric: str = "accuracy"
    """Sort by this held-out figure, the best first."""
    least: float | None = None
    """Only entries whose `metric` is at least this."""
    json: bool = False
    """Print JSON in place of the table."""


@dataclass(kw_only=True)
class ShowConfig(RunConfig):
    """`python -m zoo show NAME`."""

    name: str = MISSING
    """NAME, NAME@latest, NAME@ALIAS, NAME@DIGEST, an entry's folder, or ZOO#NAME."""
    json: bool = False
    """Print the manifest as JSON in place of the card."""


@dataclass(kw_only=True)
class VerifyConfig(RunConfig):
    """`python -m zoo verify PATH`."""

    name: str = MISSING
    """As for show."""
    require_signature: Path | None = None
    """Public key (PEM) of whoever must have signed it."""


@dataclass(kw_only=True)
class PullConfig(RunConfig):
    """`python -m zoo pull NAME`."""

    name: str | None = None
    """NAME, NAME@latest, NAME@ALIAS or NAME@DIGEST."""
    zoo: str | None = None
    """Places to look in, in this order; those of MOECAST_ZOO unless given."""
    all: bool = False
    """Every version of every entry, to mirror a zoo."""
    locked: Path | None = None
    """What this lock file names, by digest."""
    output: Path | None = None
    """Also write the entry as a folder."""
    require_signature: Path | None = None
    """Public key (PEM) of whoever must have signed it."""
    accept_rollback: bool = False
    """Take an index that is older than one seen before, as after a zoo was made anew."""

    def __post_init__(self) -> None:
        asked = [self.name is not None, self.all, self.locked is not None]
        if sum(asked) != 1:
            raise MoecastError("name one entry, or say all=true, or locked=zoo.lock")
        if self.output is not None and self.name is None:
            raise MoecastError(f"output={self.output} is for one entry: name it")


@dataclass(kw_only=True)
class PushConfig(RunConfig):
    """`python -m zoo push PATH`."""

    path: Path = MISSING
    """Folder of the entry."""
    to: str | None = None
    """Folder, `builtin`, s3:// or hf:// to publish in; default: the folder of what was pulled."""
    alias: str | None = None
    """Also name this version so, such as stable."""
    replace: bool = False
    """Forget the entry's earlier versions."""


@dataclass(kw_only=True)
class RemoveConfig(RunConfig):
    """`python -m zoo rm NAME`."""

    name: str = MISSING
    """NAME for all its versions, NAME@ALIAS or NAME@DIGEST for one."""
    zoo: str | None = None
    """Storage to remove it from; default: what was pulled."""


@dataclass(kw_only=True)
class CollectGarbageConfig(RunConfig):
    """`python -m zoo gc`."""

    zoo: str | None = None
    """Storage to clean; default: what was pulled."""


@dataclass(kw_only=True)
class LockConfig(RunConfig):
    """`python -m zoo lock`."""

    names: list[str] = field(default_factory=list)
    """Entries to pin; none: all that were pulled."""
    output: Path = Path("zoo.lock")
    """File to write."""


@dataclass(kw_only=True)
class IndexConfig(RunConfig):
    """`python -m zoo index PATH`."""

    path: Path = MISSING
    """Folder with entries in it, at any depth."""
    output: Path | None = None
    """Folder of the zoo: what to serve; `path` unless given."""
    expires_days: float | None = None
    """Days after which readers refuse this index, so that nobody can serve an old one for ever;
    run the command again before."""

    def __post_init__(self) -> None:
        if self.expires_days is not None and self.expires_days <= 0:
            raise MoecastError(f"expires_days={self.expires_days}: must be above 0")


@dataclass(kw_only=True)
class SignConfig(RunConfig):
    """`python -m zoo sign PATH`."""

    path: Path = MISSING
    """Folder of the entry."""
    key: Path = MISSING
    """Private key (PEM, elliptic curve)."""


SCHEMAS: dict[str, type] = {
    "zoo_list": ListConfig,
    "zoo_show": ShowConfig,
    "zoo_verify": VerifyConfig,
    "zoo_pull": PullConfig,
    "zoo_push": PushConfig,
    "zoo_rm": RemoveConfig,
    "zoo_gc": CollectGarbageConfig,
    "zoo_lock": LockConfig,
    "zoo_index": IndexConfig,
    "zoo_sign": SignConfig,
}
