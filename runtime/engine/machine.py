"""How much memory this process may use, and how much it has used."""

import resource
import sys
from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")
"""Version 2: where a container finds the limits that it runs under."""


def available_memory_bytes(cgroup: Path = CGROUP) -> int:
    """What can be allocated now without swapping, the container's limit included."""
    available = int(psutil.virtual_memory().available)
    limit, used = cgroup / "memory.max", cgroup / "memory.current"
    if limit.is_file() and used.is_file() and limit.read_text().strip() != "max":
        return max(0, min(available, int(limit.read_text()) - int(used.read_text())))
    return available


def peak_memory_bytes() -> int:
    """The process's largest resident set so far.

    Linux keeps `ru_maxrss` across exec, so a child would start with its parent's.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
