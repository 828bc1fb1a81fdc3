"""What figures were taken on."""

import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


def machine(threads: int) -> dict[str, Any]:
    """Processor, memory, kernel and read-ahead, and how busy the machine was before."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    ahead = {
        path.parts[3]: int(path.read_text())
        for path in Path("/sys/block").glob("*/queue/read_ahead_kb")
    }
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": threads,
        "memory_bytes": pages,
        "kernel": platform.release(),
        "read_ahead_kib": {
            name: size for name, size in ahead.items() if not name.startswith("loop")
        },
        "load_average_at_start": os.getloadavg()[0],
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
    }
