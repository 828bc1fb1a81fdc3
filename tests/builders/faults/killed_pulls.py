"""Pulls the same entry again and again, each time killed at a later system call."""

import os
from functools import partial
from pathlib import Path
from typing import Any

from tests.builders.faults.syscalls import ENDED, killed
from tests.builders.killing import in_a_child
from tests.builders.zoos import pull_tiny
from zoo.catalog import Zoo
from zoo.digest import hash_bytes
from zoo.index import BLOBS, EntryReference
from zoo.storage import cache_storage

CALLS = "write,pwrite64,rename,renameat,renameat2,close"
LONGEST = 400


def pull(address: str) -> None:
    pull_tiny(address).verify()


def left_behind() -> str:
    """What is wrong under a final name; nothing, if all is as it should be."""
    blobs = cache_storage().folder / BLOBS
    for one in blobs.glob("*") if blobs.is_dir() else ():
        if not one.name.startswith(".") and hash_bytes(one.read_bytes()) != one.name:
            return f"{one} is not whole"
    zoo = Zoo(cache_storage())
    for name in zoo.read_index().entries:
        zoo.open(EntryReference(name)).verify()
    return ""


def kill_pulls(address: str, folder: Path) -> list[dict[str, Any]]:
    """Returns of each pull whether it died, what it left, and the exit code of a pull after it.

    Each runs in a child with a separate cache, whose N-th write, rename or close (of a thread) is
    answered with SIGKILL.
    """
    runs: list[dict[str, Any]] = []
    # What is imported at first use: every file of it is opened and closed too.
    os.environ["MOECAST_CACHE"] = str(folder / "first")
    pull(address)
    for number in range(1, LONGEST):
        os.environ["MOECAST_CACHE"] = str(folder / str(number))
        spec, log = f"{CALLS}:signal=SIGKILL:when={number}", folder / f"{number}.log"
        end = killed(spec, partial(pull, address), log=log)
        runs.append({"number": number, "killed": end is None, "wrong": left_behind()})
        runs[-1] |= {"again": in_a_child(partial(pull, address))}
        runs[-1] |= {"skip": end} if end not in (None, ENDED) else {}
        if end is not None:
            break
    return runs
