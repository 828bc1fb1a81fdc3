"""The origin of a report's numbers: command, date, revision, machine and seed."""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

RUN_FILE = "run.json"
LONGEST_COMMAND = 96
"""Characters of a command in a figure; run.json has all of it."""
REVISION_CHARACTERS = 10


NESTED_PATH = re.compile(r"(?<![\w:/.])/(?:[^\s,{}\[\]/]+/)*([^\s,{}\[\]/]+)")
"""An absolute path in a list or mapping; its last part."""


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """The command that made the numbers; None: not recorded."""

    command: str
    date: str | None = None
    revision: str | None = None
    machine: str | None = None
    """Cores and processor of the machine that ran the command."""
    seed: int | None = None

    def line(self) -> str:
        """Return one line for the foot of a figure."""
        command = self.command
        if len(command) > LONGEST_COMMAND:
            command = command[: LONGEST_COMMAND - 1].rstrip() + "…"
        parts = [command]
        if self.date is not None:
            parts.append(self.date)
        if self.revision is not None:
            revision, _, edited = self.revision.partition("-")
            parts.append(f"revision {revision[:REVISION_CHARACTERS]}" + ("-dirty" * bool(edited)))
        if self.machine is not None:
            parts.append(self.machine)
        if self.seed is not None:
            parts.append(f"seed {self.seed}")
        return " · ".join(parts)


def read_provenance(run_dir: Path) -> Provenance | None:
    """Read the origin of a run folder's results; None if the run was not recorded."""
    path = run_dir / RUN_FILE
    record: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    if "command" not in record:
        return None
    return Provenance(
        command=spell_command(record["command"], record["argv"]),
        date=record["started"][:10],
        revision=record["git_revision"],
        machine=record.get("machine"),
        seed=record["seed"],
    )


def describe_origin(run_dir: Path | None) -> dict[str, Any] | None:
    """Return the origin of a run folder's results for results.json; None if not recorded."""
    origin = None if run_dir is None else read_provenance(run_dir)
    return None if origin is None else asdict(origin)


def spell_command(label: str, arguments: Sequence[str]) -> str:
    """Return a command as it is typed, of paths only the last part, without its run folder.

    Args:
        label: `PROGRAM` or `PROGRAM-COMMAND`.
    """
    program, _, command = label.partition("-")
    words = [program] if program == "moecast" else ["python -m", program]
    words += [command] if command else []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if key != "run_dir":
            if value[:1] in ("{", "["):
                value = NESTED_PATH.sub(r"\1", value)
            words.append(key + equals + (Path(value).name if value.startswith("/") else value))
    return " ".join(words)
