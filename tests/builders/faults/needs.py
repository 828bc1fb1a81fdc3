"""What fault injection needs of a machine, and what to install where it is not there."""

import ctypes.util
import importlib.util
import os
import shutil


def strace() -> str | None:
    """None when there is all that is needed; else what to do."""
    return None if shutil.which("strace") else "strace is missing: apt-get install strace"


def fuse() -> str | None:
    """None when there is all that is needed; else what to do."""
    if importlib.util.find_spec("mfusepy") is None:
        return "mfusepy is missing: pip install -c constraints.txt -e '.[dev]'"
    if not shutil.which("fusermount3") or not ctypes.util.find_library("fuse3"):
        return "FUSE is missing: apt-get install fuse3"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "no access to /dev/fuse: run as root, or start the container with --device /dev/fuse"
    return None


def tmpfs() -> str | None:
    """None when there is all that is needed; else what to do."""
    if os.geteuid() != 0:
        return "mounting a tmpfs needs root: run as root"
    return None if shutil.which("mount") else "mount is missing: apt-get install mount"
