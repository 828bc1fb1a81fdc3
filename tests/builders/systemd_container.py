"""A systemd that boots in a container on this machine's own files; it needs root.

What it writes is kept in memory, over the files of this machine, and gone when it ends.
"""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.builders.processes import install_packages, run
from tests.builders.slurm_cluster import MORTAL
from tests.builders.waiting import wait_for
from tests.docs.pages import ROOT

PROGRAMS = ("systemd-nspawn", "systemctl", "nsenter", "curl")
INSTALL = "apt-get install -y --no-install-recommends systemd systemd-container curl"
CGROUPS = Path("/sys/fs/cgroup")
LEFT_BY_NSPAWN = ("payload", "supervisor")
PYTHON, PACKAGES, SOURCE = "/opt/python", "/opt/packages", "/opt/source"
"""Places of this environment in the container: a service sees no home folders."""

BOOT = """
mount -t tmpfs tmpfs /run/systemd
mount -t tmpfs tmpfs "$0"
mkdir "$0/upper" "$0/work" "$0/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$0/upper,workdir=$0/work" "$0/root"
exec systemd-nspawn --quiet --directory="$0/root" --boot --private-network --register=no \\
    --keep-unit --link-journal=no --machine=moecast-tests "$@" -- systemd.unit=basic.target
"""


class NoSystemd(RuntimeError):
    """No systemd boots here; the message says why."""


def install() -> None:
    """Installs the packages as root, unless they are there.

    Raises:
        NoSystemd: this is not root, or not Debian.
    """
    if os.geteuid() != 0:
        raise NoSystemd(f"a container needs root; Debian's packages: {INSTALL}")
    if all(map(shutil.which, PROGRAMS)):
        return
    if shutil.which("apt-get") is None:
        raise NoSystemd(f"{', '.join(PROGRAMS)}: some are missing; on Debian: {INSTALL}")
    install_packages(INSTALL)


@dataclass(frozen=True)
class SystemdContainer:
    leader: int
    """Process id of its systemd, as this machine sees it."""

    def run(self, *command: str, check: bool = True) -> str:
        """Runs a command in the container and returns its output."""
        enter = ("nsenter", f"--target={self.leader}", "--all", "--")
        return run(*enter, *command, timeout=240, check=check).stdout.strip()

    def write(self, path: str, text: str, *, mode: str = "644") -> None:
        script = 'mkdir -p "$(dirname "$0")"; printf %s "$1" > "$0"; chmod "$2" "$0"'
        self.run("sh", "-euc", script, path, text, mode)

    def show(self, unit: str, *properties: str) -> dict[str, str]:
        """Returns what systemd says of a unit."""
        said = self.run("systemctl", "show", unit, f"--property={','.join(properties)}")
        return dict(line.split("=", 1) for line in said.splitlines())

    def install_moecast(self) -> None:
        """Makes /opt/moecast/bin/moecast of this environment."""
        environment = f"LD_LIBRARY_PATH={PYTHON}/lib PYTHONPATH={SOURCE}:{PACKAGES}"
        script = f'#!/bin/sh\n{environment} exec {PYTHON}/bin/python3 -m moecast "$@"\n'
        self.write("/opt/moecast/bin/moecast", script, mode="755")


@contextmanager
def systemd_container(folder: Path, *, binds: Mapping | None = None) -> Iterator[SystemdContainer]:
    """Boots a systemd, which sees this environment and `binds` read-only, until the block ends.

    Raises:
        NoSystemd: it does not boot.
    """
    folder.mkdir()
    site = next(path for path in sys.path if path.endswith("site-packages"))
    places = {sys.base_prefix: PYTHON, site: PACKAGES, ROOT: SOURCE, **(binds or {})}
    # In a PID namespace of its own: all of it ends with its first process.
    isolated = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    command = [*MORTAL, *isolated, "sh", "-euc", BOOT, str(folder)]
    command += [f"--bind-ro={here}:{there}" for here, there in places.items()]
    were_there = find_cgroups()
    log = folder.with_suffix(".log")
    with log.open("w") as output:
        streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
        process = subprocess.Popen(command, **streams)
    found: list[int] = []
    try:

        def is_up() -> bool:
            if process.poll() is not None:
                raise NoSystemd(f"systemd-nspawn: {log.read_text()[-2000:]}")
            found[:] = find_leaders(process.pid)
            if not found:
                return False
            state = SystemdContainer(found[0]).run("systemctl", "is-system-running", check=False)
            return state in ("running", "degraded")

        wait_for(is_up, f"systemd boots: {log}")
        yield SystemdContainer(found[0])
    finally:
        inside = psutil.Process(process.pid).children(recursive=True) if found else []
        process.kill()
        process.wait(60)
        # The kernel ends them one after another.
        psutil.wait_procs(inside, timeout=60)
        for cgroup in find_cgroups() - were_there:
            remove_cgroup(cgroup)


def find_leaders(pid: int) -> list[int]:
    """Returns the first processes of containers below a process."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError):
                status = Path(f"/proc/{child.pid}/status").read_text()
                ids = next(line for line in status.splitlines() if line.startswith("NSpid:"))
                if child.name() == "systemd" and len(ids.split()) >= 4 and ids.endswith("\t1"):
                    found.append(child.pid)
    return found


def find_cgroups() -> set[Path]:
    """Returns the control groups that systemd-nspawn makes for a container."""
    roots = [CGROUPS, *(path for path in CGROUPS.iterdir() if path.is_dir())]
    return {root / name for root in roots for name in LEFT_BY_NSPAWN if (root / name).is_dir()}


def remove_cgroup(cgroup: Path) -> None:
    """Removes a control group and those below it, once their processes have ended."""

    def is_removed() -> bool:
        folders = sorted(path for path in cgroup.rglob("*") if path.is_dir())
        for folder in [*reversed(folders), cgroup]:
            with contextlib.suppress(OSError):  # its processes are ending
                folder.rmdir()
        return not cgroup.exists()

    wait_for(is_removed, f"{cgroup} is free")
