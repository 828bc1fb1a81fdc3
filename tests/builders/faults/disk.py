"""Mounts the pass-through file system in a separate process and always unmounts it."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.builders.faults.rules import Disk
from tests.builders.processes import ROOT

MOUNT_SECONDS = 120.0
"""Starting Python and mounting takes a fifth of a second; more only on a busy machine."""


class CannotMountError(Exception):
    """This machine does not let us mount."""


@contextmanager
def faulty_disk(source: Path, folder: Path) -> Iterator[Disk]:
    """Mounts `source` through a file system without faults, until its `Disk` sets some.

    Args:
        folder: folder of the mount point, the control file and the log.

    Raises:
        CannotMountError: with the server's message.
    """
    folder.mkdir(parents=True, exist_ok=True)
    disk = Disk(folder / "mount", folder / "rules.json")
    disk.mount.mkdir(exist_ok=True)
    disk.caches()
    with (folder / "server.log").open("w+b") as log:
        command = [sys.executable, "-m", "tests.builders.faults.fusefs"]
        command += map(str, (source, disk.mount, disk.control))
        server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, cwd=ROOT)
        try:
            _await_mount(disk.mount, server, folder / "server.log")
            yield disk
        finally:
            server.stdin.close()
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
            unmount = ["fusermount3", "-u", "-z", str(disk.mount)]
            subprocess.run(unmount, check=False, capture_output=True)


def _await_mount(mount: Path, server: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + MOUNT_SECONDS
    while not os.path.ismount(mount):
        if server.poll() is not None or time.monotonic() > deadline:
            raise CannotMountError(log.read_text().strip()[-500:] or "no mount after two minutes")
        time.sleep(0.01)
