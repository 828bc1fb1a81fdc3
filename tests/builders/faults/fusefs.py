"""A pass-through file system whose reads obey a control file.

    python -m tests.builders.faults.fusefs SOURCE MOUNT CONTROL

Unmounts itself when its standard input ends, so it never outlives who started it.
"""

import errno
import fnmatch
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import mfusepy

from tests.builders.faults.rules import Disk, Rule


class PassThrough(mfusepy.Operations):
    """Read-only view of a folder. Handles are real descriptors."""

    use_ns = True

    def __init__(self, source: Path, disk: Disk):
        self._source = source
        self._disk = disk
        self._lock = threading.Lock()
        self._seen: tuple[int, int] | None = None
        self._direct_io = False
        self._left: list[tuple[Rule, float]] = []
        """Each rule with how many reads it still spoils."""

    def _real(self, path: str) -> Path:
        return self._source / path.lstrip("/")

    def _refresh(self) -> None:
        status = self._disk.control.stat()
        if self._seen == (status.st_ino, status.st_mtime_ns):
            return
        content = json.loads(self._disk.control.read_text())
        rules = [Rule(**rule) for rule in content["rules"]]
        self._seen = status.st_ino, status.st_mtime_ns
        self._direct_io = content["direct_io"]
        self._left = [(rule, rule.times or float("inf")) for rule in rules]

    def _take(self, path: str, offset: int, size: int) -> list[Rule]:
        """The rules that this read falls under, each counted and noted."""
        _, _, thread = mfusepy.fuse_get_context()
        with self._lock:
            self._refresh()
            hit = []
            for i, (rule, left) in enumerate(self._left):
                if thread == rule.spare or not left or offset + size <= rule.start:
                    continue
                if fnmatch.fnmatch(Path(path).name, rule.file):
                    self._left[i] = rule, left - 1
                    hit.append(rule)
            if hit:
                with self._disk.log.open("a") as log:
                    log.writelines(f"{rule.kind} {path} {offset} {size}\n" for rule in hit)
            return hit

    def getattr(self, path: str, fh: Any = None) -> dict[str, Any]:
        status = self._real(path).stat()
        keys = ("st_mode", "st_nlink", "st_uid", "st_gid", "st_size", "st_ino")
        found = {key: getattr(status, key) for key in keys}
        with self._lock:
            self._refresh()
            for rule, _ in self._left:
                if rule.kind == "truncate" and fnmatch.fnmatch(Path(path).name, rule.file):
                    found["st_size"] = min(found["st_size"], rule.start)
        return found

    def readdir(self, path: str, fh: Any) -> list[str]:
        return [".", "..", *(entry.name for entry in self._real(path).iterdir())]

    def open(self, path: str, info: Any) -> int:
        with self._lock:
            self._refresh()
            info.direct_io = self._direct_io
        info.fh = os.open(self._real(path), os.O_RDONLY)
        return 0

    def read(self, path: str, size: int, offset: int, info: Any) -> bytes:
        content = os.pread(info.fh, size, offset)
        for rule in self._take(path, offset, size):
            if rule.kind == "hang":
                time.sleep(rule.seconds)
            elif rule.kind == "freeze":
                self._await_change()
            elif rule.kind == "eio":
                raise mfusepy.FuseOSError(errno.EIO)
            elif rule.kind == "short":
                content = content[: max(1, len(content) // 2)]
            elif rule.kind == "truncate":
                content = content[: max(0, rule.start - offset)]
            elif rule.kind == "flip":
                spoilt = bytearray(content)
                spoilt[len(content) // 2 | 3] ^= 0x40  # of a float32, its exponent
                content = bytes(spoilt)
        return content

    def _await_change(self) -> None:
        seen = self._seen
        while self._seen == seen:
            time.sleep(0.02)
            with self._lock:
                self._refresh()

    def release(self, path: str, info: Any) -> int:
        os.close(info.fh)
        return 0


def leave_with_parent(mount: str) -> None:
    """Reads under way get an error when the process that answers them is gone."""
    sys.stdin.buffer.read()
    subprocess.run(["fusermount3", "-u", "-z", mount], check=False, capture_output=True)
    os._exit(0)


def main(source: str, mount: str, control: str) -> None:
    threading.Thread(target=leave_with_parent, args=[mount], daemon=True).start()
    operations = PassThrough(Path(source), Disk(Path(mount), Path(control)))
    options = {"foreground": True, "nothreads": False, "ro": True, "attr_timeout": 0}
    mfusepy.FUSE(operations, mount, raw_fi=True, **options)


if __name__ == "__main__":
    main(*sys.argv[1:])
