"""A zoo behind a web server, and the zoo's commands as a user types them."""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from configs.program import run_program
from predictors.errors import DiskFullError
from tests.builders.entries import tiny_entry
from tests.builders.web import Site
from zoo.catalog import WritableZoo, Zoo
from zoo.entry import ZooEntry, open_entry
from zoo.index import EntryReference, blob_path
from zoo.load import pull_reference
from zoo.manifest import EntryManifest
from zoo.storage.base import Storage, WritableStorage
from zoo.storage.folder import FolderStorage
from zoo.storage.remote import HttpStorage

Refused = Callable[..., str]
"""Runs `moecast zoo ...`, which must end with 2, and returns what it writes to standard error."""


def zoo(*arguments: object) -> int:
    """Runs `moecast zoo ...` and returns the exit code."""
    return run_program("zoo", [str(one) for one in arguments])


def publish(place: Path | WritableStorage, **changes: Any) -> EntryManifest:
    """Makes an entry and adds it to a zoo: that in a folder, or in any storage."""
    with TemporaryDirectory() as folder:
        manifest = tiny_entry(Path(folder) / "e", **changes)
        storage = FolderStorage(place) if isinstance(place, Path) else place
        WritableZoo(storage).add(open_entry(Path(folder) / "e"))
    return manifest


def fail_each_fsync(monkeypatch: pytest.MonkeyPatch) -> Iterator[AbstractContextManager[None]]:
    """Blocks that end as their Nth fsync fails, N from 1; in the last one, all succeed."""
    real, calls = os.fsync, 0

    @contextmanager
    def fail(number: int) -> Iterator[None]:
        nonlocal calls
        calls = 0

        def fsync(handle: int) -> None:
            nonlocal calls
            calls += 1
            if calls == number:
                raise OSError(errno.ENOSPC, "No space left on device")
            real(handle)

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fsync)
            try:
                yield
            except (OSError, DiskFullError):
                assert calls >= number
            else:
                assert calls < number, "a failure was not reported"

    for number in count(1):
        yield fail(number)
        if calls < number:
            assert number > 10
            return


def files_of(site: Site) -> dict[str, int]:
    """Paths of everything that a pull of its entry downloads, with their sizes."""
    manifest = Zoo(FolderStorage(site.folder)).open(EntryReference("tiny/stride")).manifest
    found = {blob_path(one.sha256): one.size for one in manifest.files.values()}
    return {**found, blob_path(manifest.digest): len(manifest.to_bytes())}


def pull_tiny(place: str | Storage) -> ZooEntry:
    """Pulls its entry, from the server's address or the storage."""
    storage = HttpStorage(place) if isinstance(place, str) else place
    return pull_reference(Zoo(storage), EntryReference("tiny/stride"))
