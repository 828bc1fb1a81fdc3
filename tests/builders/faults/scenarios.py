"""What is done to a served model while a disk or a thread fails. Each returns what happened."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from runtime.errors import CheckpointError
from tests.builders.faults.bench import Bench
from tests.builders.faults.disk import faulty_disk
from tests.builders.faults.rules import Disk, Rule
from tests.builders.faults.syscalls import CannotTraceError, injected
from tests.builders.faults.workers import killed_worker

Result = dict[str, Any]


def _timed(bench: Bench, model: PreTrainedModel) -> Result:
    stalled = model.moecast.stats()["stall_seconds"]
    start = time.monotonic()
    outcome = bench.ask(model)
    return {
        "outcome": outcome,
        "seconds": time.monotonic() - start,
        "stall_seconds": model.moecast.stats()["stall_seconds"] - stalled,
    }


@contextmanager
def _closing(model: PreTrainedModel, result: Result) -> Iterator[None]:
    """Closes the model and notes how long that took."""
    with model.moecast:
        yield
        start = time.monotonic()
    result["close_seconds"] = time.monotonic() - start


def spoilt_system_calls(bench: Bench, *, mode: str, inject: str) -> Result:
    """Requests before, while and after strace spoils this process's reads of the weights."""
    result: Result = {}
    model = bench.load(mode, bench.model_folder)
    with _closing(model, result):
        result["before"] = _timed(bench, model)
        weights = sorted(bench.model_folder.glob("*.safetensors"))
        try:
            with injected(inject, paths=weights, log=bench.folder / "strace.log") as injection:
                result["during"] = _timed(bench, model)
        except CannotTraceError as error:
            return {"skip": f"strace may not attach here: {error}"}
        result["num_faults"] = injection.num_faults()
        result["after"] = _timed(bench, model)
    return result


def spoilt_disk(
    bench: Bench, *, mode: str, mount: str, control: str, rules: list[dict], heals_in: float = 0.0
) -> Result:
    """Requests before, while and after a disk fails, and one more when a hang is over.

    Args:
        heals_in: seconds to wait before the last request.
    """
    disk = Disk(Path(mount), Path(control))
    result: Result = {}
    model = bench.load(mode, disk.mount)
    disk.is_well()
    with _closing(model, result):
        result["before"] = _timed(bench, model)
        disk.fails(*(Rule(**rule) for rule in rules))
        result["during"] = _timed(bench, model)
        result["num_faults"] = disk.num_faults()
        disk.is_well()
        result["after"] = _timed(bench, model)
        if heals_in:
            time.sleep(heals_in)
            result["healed"] = _timed(bench, model)
    return result


def disk_comes_back(bench: Bench, *, folder: str) -> Result:
    """The disk is unplugged, and mounted again with the same files: old descriptors stay dead."""
    result: Result = {}
    with faulty_disk(bench.model_folder, Path(folder)) as disk:
        model = bench.load("on-demand", disk.mount)
        result["before"] = _timed(bench, model)
    with _closing(model, result):
        result["during"] = _timed(bench, model)
        with faulty_disk(bench.model_folder, Path(folder)):
            result["after"] = _timed(bench, model)
    return result


def spoilt_while_loading(bench: Bench, *, mount: str, control: str, rules: list[dict]) -> Result:
    """Loading from a disk that fails, then from the same disk when it is well."""
    disk = Disk(Path(mount), Path(control))
    disk.caches(*(Rule(**rule) for rule in rules))
    try:
        bench.load("on-demand", disk.mount).moecast.close()
        outcome = "loaded"
    except CheckpointError as error:
        outcome = f"error: {error}"
    num_faults = disk.num_faults()
    disk.caches()
    model = bench.load("on-demand", disk.mount)
    with model.moecast:
        return {"outcome": outcome, "num_faults": num_faults, "after": _timed(bench, model)}


def worker_killed(bench: Bench, *, mode: str, how: str) -> Result:
    """Requests before, while and after the transfer thread ends."""
    result: Result = {}
    model = bench.load(mode, bench.model_folder)
    with _closing(model, result):
        result["before"] = _timed(bench, model)
        with killed_worker(model.moecast.engine, how=how) as killed:
            result["during"] = _timed(bench, model)
        result["num_faults"] = killed()
        result["after"] = _timed(bench, model)
        result["workers"] = killed.num_alive()
    return result
