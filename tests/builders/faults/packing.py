"""Packs stores on disks that are full, and in processes that are killed at a chosen system call."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

from runtime.commands import pack
from runtime.config import ModelConfig, PackConfig
from runtime.errors import StoreError
from runtime.store.packed.manifest import read_manifest
from runtime.store.packed.store import open_store
from runtime.store.packed.writer import Advance, digest_contents
from runtime.store.packed.writer import pack as write_store
from tests.builders.faults.bench import Bench
from tests.builders.faults.syscalls import ENDED, CannotTraceError, injected, killed
from tests.builders.models import tiny_qwen2_moe

Result = dict[str, Any]

STEPS = {"write": 4, "pwrite64": 2, "fsync": 1, "rename": 1, "renameat2": 1}
STEPS |= {"unlink": 1, "unlinkat": 2}
"""System calls that change the disk, and the interval at which to kill: 1 is every call."""


def packed(model: Path, output: Path, *, overwrite: bool = True) -> str:
    """Packs, or carries on: `packed`, or the error in moecast's own words."""
    config = ModelConfig(name="tiny", id=str(model))
    try:
        done = pack.run(PackConfig(model=config, output=output, overwrite=overwrite))
    except StoreError as error:
        return f"error: {error}"
    return f"packed: {done['experts_written']} written, {done['experts_verified']} kept"


def verified(output: Path, model: Path) -> str:
    """`whole` when every record of the store is what its checksum says."""
    said = packed(model, output, overwrite=False)
    return "whole" if said.startswith("packed: 0 written") else said


@contextmanager
def _advancing(each: Advance) -> Iterator[None]:
    """Calls `each` with the number of experts whenever some more are packed."""

    def watched(*args, advance: Advance, **kwargs):
        def both(count: int) -> None:
            each(count)
            advance(count)

        return write_store(*args, advance=both, **kwargs)

    with patch.object(pack, "pack", watched):
        yield


def packing_fills_the_disk(bench: Bench, *, folder: str, by: str) -> Result:
    """A good store is to be replaced on a disk that fills up meanwhile.

    Args:
        by: `others`, another user's file, on a separate disk in `folder`; `limit`, the limit of
            this process on the size of a file.
    """
    output, filler = Path(folder) / "store", Path(folder) / "filler"
    model = bench.disk / "model"
    result: Result = {"first": packed(model, output)}
    files = {file.name: file.read_bytes() for file in output.iterdir()}

    num_packed = 0

    def fill(count: int) -> None:
        nonlocal num_packed
        num_packed += count
        if num_packed < 20:
            return
        with suppress(OSError), filler.open("ab", buffering=0) as opened:
            while opened.write(bytes(1 << 20)):
                pass

    if by == "others":
        with _advancing(fill):
            result["during"] = packed(model, output)
        filler.unlink()
    else:
        unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, unlimited[1]))
        result["during"] = packed(model, output)
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    result["untouched"] = files == {file.name: file.read_bytes() for file in output.iterdir()}
    result["after"] = packed(model, output)
    result["verified"] = verified(output, model)
    return result


def packing_fails_to_write(bench: Bench, *, folder: str, inject: str) -> Result:
    """A good store is to be replaced while strace spoils the writes."""
    output, model = Path(folder) / "store", bench.disk / "model"
    result: Result = {"first": packed(model, output)}
    work = output.parent / f".{output.name}.packing"
    store = work / digest_contents(read_manifest(output)[0]) / "store"
    records = [store / file.name for file in output.iterdir()]
    records += [file.with_suffix(".part") for file in records]
    log = bench.folder / "strace.log"
    try:
        with injected(inject, paths=records, log=log):
            result["during"] = packed(model, output)
    except CannotTraceError as error:
        return {"skip": f"strace may not attach here: {error}"}
    result["num_faults"] = log.read_text(errors="replace").count("(INJECTED)")
    result["verified"] = verified(output, model)
    result["after"] = packed(model, output)
    result["verified_after"] = verified(output, model)
    return result


def packing_is_killed(bench: Bench, *, folder: str) -> Result:
    """SIGKILL at the n-th system call of each kind, until a run comes to its end; after each kill
    the old store or the new one is there and whole, and the next run carries on."""
    model, output = Path(folder) / "model", Path(folder) / "store"
    tiny_qwen2_moe(model, num_layers=2, num_experts=3)
    result: Result = {"first": packed(model, output), "not_whole": [], "kills": 0}
    for name, step in STEPS.items():
        call = 1
        while (status := _killed(f"{name}:signal=SIGKILL:when={call}", model, output)) is None:
            result["kills"] += 1
            if not _is_whole(output):
                result["not_whole"].append(f"{name} {call}")
            call += step
        if status != ENDED:
            return {"skip": status}
    result["after"] = packed(model, output)
    result["verified"] = verified(output, model)
    result["left"] = sorted(file.name for file in output.parent.iterdir())
    return result


def _killed(inject: str, model: Path, output: Path) -> str | None:
    """Packs in a separate process and returns how it ended; None if it was killed."""

    def pack() -> None:
        said = packed(model, output)
        assert said.startswith("packed"), said

    return killed(inject, pack, log=output.parent / "strace.log")


def _is_whole(output: Path) -> bool:
    """Whether a reader finds a store, with all its bytes as they should be."""
    from runtime.store.packed.writer import _verify

    try:
        _verify(open_store(output, None), lambda _: None)
    except StoreError:
        return False
    return True
