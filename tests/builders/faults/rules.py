"""What goes wrong with which reads, as a file that a disk's server obeys and a scenario changes."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Rule:
    """One fault for reads that touch bytes from `start` on of files that match."""

    kind: str
    """eio, short (half of the requested bytes), flip (one bit in the middle of the read), hang,
    freeze (until the rules change), truncate (the file ends at `start`)."""
    file: str = "*"
    start: int = 0
    times: int | None = None
    """How many reads go wrong before the fault is gone; None: all."""
    seconds: float = 0.0
    """For hang."""
    spare: int | None = None
    """The native id of a thread whose reads go well."""


@dataclass(frozen=True)
class Disk:
    """The control file of a mounted pass-through; its log has a line for each fault done."""

    mount: Path
    control: Path

    def fails(self, *rules: Rule) -> None:
        """From now on these rules, and no page cache: each read reaches the server."""
        self._write(rules, direct_io=True)

    def is_well(self) -> None:
        self.fails()

    def caches(self, *rules: Rule) -> None:
        """As `fails`, but through the page cache, so that files can be memory-mapped."""
        self._write(rules, direct_io=False)

    def _write(self, rules: Sequence[Rule], *, direct_io: bool) -> None:
        content = {"direct_io": direct_io, "rules": [asdict(rule) for rule in rules]}
        temporary = self.control.with_suffix(".tmp")
        temporary.write_text(json.dumps(content))
        temporary.replace(self.control)

    @property
    def log(self) -> Path:
        return self.control.with_suffix(".log")

    def num_faults(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0
