"""The read-ahead of the disk under the weights, changed for the time of a run.

A fault in a mapped file reads that many KiB around the missing page.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from predictors.errors import MoecastError


def setting_file(path: Path) -> Path:
    """Returns the file of /sys that holds the read-ahead of the disk under a path.

    Raises:
        MoecastError: the file system is on no disk, as tmpfs.
    """
    device = path.stat().st_dev
    block = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    for folder in (block, block.parent):  # a partition has its disk's
        setting = folder / "queue" / "read_ahead_kb"
        if setting.is_file():
            return setting
    raise MoecastError(
        f"{path} is on no disk whose read-ahead can be set; choose another folder, or read_ahead=[]"
    )


def check_settable(setting: Path) -> None:
    """Writes the present value.

    Raises:
        MoecastError: it is not allowed.
    """
    try:
        setting.write_text(setting.read_text())
    except OSError as error:
        raise MoecastError(
            f"read_ahead: cannot set {setting} ({error.strerror}); run as root, or with "
            "read_ahead=[] at the machine's own"
        ) from None


@contextmanager
def read_ahead(setting: Path, kib: int) -> Iterator[None]:
    """Sets the read-ahead, and restores it at the end, also if the process is asked to end."""
    before = setting.read_text()
    handler = signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    setting.write_text(str(kib))
    try:
        yield
    finally:
        setting.write_text(before)
        signal.signal(signal.SIGTERM, handler)
