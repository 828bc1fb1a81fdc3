"""Configurations of the zoo's commands.

A zoo is given by a folder, `builtin`, or an https://, s3:// or hf:// address; several are separated
by commas.
"""

from dataclasses import dataclass, field
from pathlib import Path

from predictors.config import RunConfig, require_at_least
from predictors.errors import MoecastError


@dataclass(frozen=True, kw_only=True)
class ListConfig(RunConfig):
    zoo: str | None = None
    """Zoos to list; default: the pulled entries, the built-in zoo and those of MOECAST_ZOO."""
    model: str | None = None
    """Only predictors of this model: part of its name or id, or a pattern such as qwen*."""
    metric: str = "accuracy"
    """Held-out metric to sort by, the best first."""
    json: bool = False
    """Print JSON instead of a table."""


@dataclass(frozen=True, kw_only=True)
class EntryConfig(RunConfig):
    """Options of a command on one entry; those of `zoo show`."""

    name: str
    """NAME, NAME@latest, NAME@ALIAS, NAME@DIGEST, an entry's folder, or ZOO#NAME."""


@dataclass(frozen=True, kw_only=True)
class VerifyEntryConfig(EntryConfig):
    require_signature: Path | None = None
    """Public key (PEM) with which the entry must be signed."""


@dataclass(frozen=True, kw_only=True)
class CompareConfig(RunConfig):
    name: str
    """Entry A: NAME, NAME@ALIAS, NAME@DIGEST, an entry's folder, or ZOO#NAME."""
    other: str
    """Entry B, the same way. Differences are B less A."""
    json: bool = False
    """Print JSON instead of a table."""


@dataclass(frozen=True, kw_only=True)
class ChangeConfig(RunConfig):
    """Options of a command that changes a zoo."""

    zoo: str | None = None
    """Zoo to change: a folder, `builtin`, s3:// or hf://; default: the pulled entries."""
    key: Path | None = None
    """Private key (PEM, elliptic curve) that signs the index."""


@dataclass(frozen=True, kw_only=True)
class PromoteConfig(ChangeConfig):
    name: str
    """The version to promote: NAME, NAME@ALIAS or NAME@DIGEST."""
    alias: str
    """Name that it gets, such as candidate or production."""
    max_drop: float = 0.01
    """Refuse if a held-out metric is lower by more than this than that of the version with the
    alias now."""

    def __post_init__(self) -> None:
        require_at_least(self, max_drop=0)


@dataclass(frozen=True, kw_only=True)
class PullConfig(RunConfig):
    name: str | None = None
    """NAME, NAME@ALIAS or NAME@DIGEST; or MODEL or MODEL@ALIAS, for all entries that `system`
    takes."""
    zoo: str | None = None
    """Zoos to pull from, in order of preference; default: those of MOECAST_ZOO."""
    all: bool = False
    """Pull every version of every entry, to mirror a zoo."""
    locked: Path | None = None
    """Pull the entries of this lock file, by digest."""
    require_signature: Path | None = None
    """Public key (PEM) with which the zoo's index and the entry must be signed; default:
    MOECAST_REQUIRE_SIGNATURE."""

    def __post_init__(self) -> None:
        selections = [self.name is not None, self.all, self.locked is not None]
        if sum(selections) != 1:
            raise MoecastError("give one of name=NAME, all=true and locked=zoo.lock")


@dataclass(frozen=True, kw_only=True)
class PushConfig(ChangeConfig):
    path: Path
    """Folder of an entry or of several, or the run folder of `moecast train`: all its entries."""
    alias: str | None = None
    """Another name for this version, such as stable."""


@dataclass(frozen=True, kw_only=True)
class RemoveConfig(ChangeConfig):
    name: str
    """NAME for all its versions; NAME@latest, NAME@ALIAS or NAME@DIGEST for one."""


@dataclass(frozen=True, kw_only=True)
class CollectGarbageConfig(RunConfig):
    zoo: str | None = None
    """Zoo to clean; default: the pulled entries."""


@dataclass(frozen=True, kw_only=True)
class LockConfig(RunConfig):
    names: list[str] = field(default_factory=list)
    """Entries to lock; default: all pulled entries."""
    zoo: str | None = None
    """Zoos to name in the file; default: the built-in one and those of MOECAST_ZOO."""
    output: Path = Path("zoo.lock")
    """File to write."""


@dataclass(frozen=True, kw_only=True)
class SignConfig(RunConfig):
    path: Path
    """Folder of the entry."""
    key: Path
    """Private key (PEM, elliptic curve)."""
