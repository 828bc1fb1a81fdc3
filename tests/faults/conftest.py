"""A host for scenarios, disks that fail, and a loud line for what could not run here."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from tests.builders.faults import needs
from tests.builders.faults.disk import CannotMountError, faulty_disk
from tests.builders.faults.host import serve
from tests.builders.faults.rules import Disk
from tests.builders.forked import forks
from tests.builders.processes import run

Scenario = Callable[..., dict[str, Any]]

LIMIT_SECONDS = 300.0
"""A scenario that takes longer hangs; most take a second, more where the machine is busy."""
SKIPPED: dict[str, int] = {}
"""Why, and how many tests."""


def skip(reason: str | None) -> None:
    """Skips the test if there is a reason, and counts it for the line at the end."""
    if reason:
        SKIPPED[reason] = SKIPPED.get(reason, 0) + 1
        pytest.skip(reason)


@contextmanager
def mount_small_disk(folder: Path, *, size: str) -> Iterator[Path]:
    """Mounts a file system of this size at a new folder; skips the test where that is impossible.

    Args:
        size: bytes as tmpfs takes them, such as 60m.
    """
    skip(needs.tmpfs())
    folder.mkdir()
    options = ("-t", "tmpfs", "-o", f"size={size}")
    mounted = run("mount", *options, "moecast-faults", folder, check=False)
    if mounted.returncode:
        skip(f"a tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        run("umount", "-l", folder, check=False)


@contextmanager
def mount_faulty_disk(source: Path, folder: Path) -> Iterator[Disk]:
    """Mounts `source` through a file system that can fail, or skips the test."""
    skip(needs.fuse())
    try:
        with faulty_disk(source, folder) as mounted:
            yield mounted
    except CannotMountError as error:
        skip(f"FUSE cannot mount here: {error}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for reason, count in SKIPPED.items():
        terminalreporter.write_line(f"NOT RUN: {count} fault tests: {reason}", yellow=True)


@pytest.fixture(scope="session")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Connection, Path]]:
    """Yields the way to a process that plays scenarios, and the folder of its model."""
    ours, theirs = Pipe()
    process = forks().Process(target=serve, args=(tmp_path_factory.mktemp("faults"), theirs))
    process.start()
    theirs.close()
    with ours:
        yield ours, ours.recv()
    process.join(240)
    if process.is_alive():
        process.kill()
        pytest.fail("the host of the scenarios did not end")


@pytest.fixture
def scenario(host: tuple[Connection, Path]) -> Scenario:
    """Runs one in a separate process; a death, a hang or a foreign exception fails the test."""

    def play(name: str, *, limit: float = LIMIT_SECONDS, **arguments: Any) -> dict[str, Any]:
        connection, _ = host
        connection.send({"scenario": name, "arguments": arguments, "seconds": limit})
        answer = connection.recv()
        assert answer["exit"] == 0, f"exit {answer['exit']}\n{answer['stderr']}"
        skip(answer["result"].get("skip"))
        return answer["result"]

    return play


@pytest.fixture
def strace() -> None:
    skip(needs.strace())


@pytest.fixture
def disk(host: tuple[Connection, Path], tmp_path: Path) -> Iterator[Disk]:
    """The model and its packed store seen through a file system that can fail."""
    _, source = host
    with mount_faulty_disk(source, tmp_path) as mounted:
        yield mounted
