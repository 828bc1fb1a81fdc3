"""Reads the `.wandb` files that an offline run of Weights & Biases has written.

They are LevelDB's log format, records of blocks of 32 KiB, after a header of seven bytes; each
record is a protobuf message of wandb's own.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.builders.waiting import wait_for

HEADER_BYTES, BLOCK_BYTES, RECORD_HEADER_BYTES = 7, 32 << 10, 7
FULL, LAST = 1, 4
"""Types of the records that end a message."""


@dataclass
class WandbFile:
    """The content of one `.wandb` file, with texts in place of messages' JSON."""

    run: Any = None
    """The last RunRecord."""
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    artifacts: dict[str, Any] = field(default_factory=dict)
    """ArtifactRecords by name."""
    exit_code: int | None = None


def read_wandb_files(run_dir: Path) -> list[WandbFile]:
    """Reads the files of a run folder in the order in which they were begun."""
    return [read_file(path) for path in sorted(run_dir.glob("wandb/offline-run-*/*.wandb"))]


def messages(data: bytes) -> Iterator[bytes]:
    assert data.startswith(b":W&B")
    place, message = HEADER_BYTES, b""
    while place + RECORD_HEADER_BYTES <= len(data):
        left = BLOCK_BYTES - place % BLOCK_BYTES
        if left < RECORD_HEADER_BYTES:
            place += left
            continue
        # Four bytes of checksum, two of length, one of type.
        length = int.from_bytes(data[place + 4 : place + 6], "little")
        kind = data[place + 6]
        place += RECORD_HEADER_BYTES
        if place + length > len(data):
            return  # still being written
        message += data[place : place + length]
        place += length
        if kind in (FULL, LAST):
            yield message
            message = b""


def set_items(values: dict[str, Any], items: Any) -> None:
    """Sets items of a key or of a path of keys."""
    for item in items:
        node, keys = values, list(item.nested_key) or [item.key]
        for key in keys[:-1]:
            node = node.setdefault(key, {})
        node[keys[-1]] = json.loads(item.value_json)


def read_file(path: Path) -> WandbFile:
    """Reads a file when its last record is there: wandb may still write when a run has ended."""
    return wait_for(lambda: read_ended(path), f"the end of the run in {path}")


def read_ended(path: Path) -> WandbFile | None:
    """Reads a file; None as long as it has no record of the run's end."""
    from wandb.proto.wandb_internal_pb2 import Record

    file = WandbFile()
    data = path.read_bytes()
    for message in messages(data) if data else ():
        record = Record()
        record.ParseFromString(message)
        match record.WhichOneof("record_type"):
            case "run":
                file.run = record.run
            case "config":
                set_items(file.config, record.config.update)
            case "summary":
                set_items(file.summary, record.summary.update)
            case "history":
                file.history.append({})
                set_items(file.history[-1], record.history.item)
            case "artifact":
                file.artifacts[record.artifact.name] = record.artifact
            case "exit":
                file.exit_code = record.exit.exit_code
    return None if file.exit_code is None else file
