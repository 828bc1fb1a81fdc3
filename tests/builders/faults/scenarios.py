"""What is done to a served model while a disk or a thread fails. Each returns what happened."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from runtime.errors import CheckpointError, TransferError
from tests.builders.faults import workers
from tests.builders.faults.bench import Bench
from tests.builders.faults.disk import faulty_disk
from tests.builders.faults.rules import Disk, Rule
from tests.builders.served import read_in_python

Result = dict[str, Any]


@contextmanager
def _serving(
    bench: Bench, mode: str, disk: Path | None = None, **options: Any
) -> Iterator[tuple[PreTrainedModel, Result, Callable[[], Result]]]:
    """Yields a model, an empty result, and a function that makes a request."""
    model = bench.load(mode, disk or bench.disk, **options)
    with model.moecast:
        yield model, {}, partial(_ask, bench, model)


def _ask(bench: Bench, model: PreTrainedModel) -> Result:
    stalled = model.moecast.stats()["stall_seconds"]
    outcome = bench.ask(model)
    return {"outcome": outcome, "stall_seconds": model.moecast.stats()["stall_seconds"] - stalled}


def spoilt_disk(
    bench: Bench, *, mode: str, disk: Disk, rule: Rule, system=None, well_after_seconds=None
) -> Result:
    """Requests before, while and after a disk fails.

    Args:
        system: options of the system.
        well_after_seconds: the disk works again after this time, even within a request.
    """
    with _serving(bench, mode, disk.mount, system=system) as (model, result, ask):
        disk.is_well()
        # What is open since loading is read through the page cache, where a short read means the
        # end of the file.
        model.moecast.engine.store.files.close()
        result["before"] = ask()
        disk.fails(rule)
        if well_after_seconds is not None:
            threading.Timer(well_after_seconds, disk.is_well).start()
        result["during"] = ask()
        result["num_faults"] = disk.num_faults()
        disk.is_well()
        result["after"] = ask()
    return result


def disk_comes_back(bench: Bench, *, folder: str) -> Result:
    """The disk is unplugged, and mounted again with the same files: old descriptors stay dead."""
    result: Result = {}
    with faulty_disk(bench.disk, Path(folder)) as disk:
        model = bench.load("on-demand", disk.mount)
        result["before"] = _ask(bench, model)
    with model.moecast:
        result["during"] = _ask(bench, model)
        with faulty_disk(bench.disk, Path(folder)):
            result["after"] = _ask(bench, model)
    return result


def spoilt_while_loading(bench: Bench, *, disk: Disk, rule: Rule) -> Result:
    """Loading from a disk that fails, then from the same disk when it is well."""
    disk.caches(rule)
    try:
        bench.load("on-demand", disk.mount).moecast.close()
        outcome = "loaded"
    except (CheckpointError, TransferError) as error:
        outcome = f"error: {error}"
    num_faults = disk.num_faults()
    disk.caches()
    model = bench.load("on-demand", disk.mount)
    with model.moecast:
        return {"outcome": outcome, "num_faults": num_faults, "after": _ask(bench, model)}


def worker_killed(bench: Bench, *, mode: str, how: str) -> Result:
    """Requests before, while and after a transfer thread ends."""
    with _serving(bench, mode) as (model, result, ask):
        read_in_python(model.moecast.engine)
        result["before"] = ask()
        with workers.killed_worker(model.moecast.engine, how=how) as killed:
            result["during"] = ask()
        result["num_faults"] = len(killed)
        result["after"] = ask()
        result["num_workers"] = len(workers.transfer_threads())
    return result


def worker_hangs(bench: Bench, *, mode: str, disk: Disk, close_early: bool) -> Result:
    """The read of a transfer thread hangs until the end; the computation's own reads go well.

    Args:
        close_early: close the model while the read still hangs.
    """
    with _serving(bench, mode, disk.mount) as (model, result, ask):
        disk.is_well()
        result["before"] = ask()
        disk.fails(Rule("freeze", times=1, spare=threading.get_native_id()))
        while not disk.num_faults():
            result["during"] = ask()
        result["num_faults"] = disk.num_faults()
        if not close_early:
            result["lost_threads"] = model.moecast.stats()["lost_threads"]
            disk.is_well()
            while model.moecast.stats()["lost_threads"]:
                time.sleep(0.01)
            result["after"] = ask()
    disk.is_well()
    return result


def interrupted(bench: Bench, *, mode: str, read: int) -> Result:
    """Ctrl-C in the middle of a request; then one from the same thread, and one from another.

    Args:
        read: before which read the signal comes, whichever thread reads.
    """
    with _serving(bench, mode) as (model, result, ask):
        result["before"] = ask()
        with workers.before_read(model.moecast.engine, read, workers.signal_main_thread):
            try:
                result["during"] = ask()
            except KeyboardInterrupt:
                result["during"] = {"outcome": "interrupted"}
        result["after"] = ask()
        result["elsewhere"] = _in_another_thread(bench, model)
    return result


def refused_elsewhere(bench: Bench, *, mode: str) -> Result:
    """A request fails in a thread that then ends; the next comes from another."""
    with _serving(bench, mode) as (model, result, ask):
        with workers.before_read(model.moecast.engine, 1, workers.refuse, times=1000):
            result["during"] = _in_another_thread(bench, model)
        result["after"] = ask()
    return result


def _in_another_thread(bench: Bench, model: PreTrainedModel) -> Result:
    found: Result = {"outcome": "hangs"}
    thread = threading.Thread(target=lambda: found.update(_ask(bench, model)), daemon=True)
    thread.start()
    thread.join(60)
    return found


def interrupted_anywhere(bench: Bench, *, mode: str, seed: int, rounds: int) -> Result:
    """Ctrl-C again and again, at moments spread over a request; each time the next is served."""
    chance = random.Random(seed)
    with _serving(bench, mode) as (model, result, _):
        result |= {"interrupted": 0, "outcomes": []}
        with workers.interrupt_at_call(None) as num_calls:
            bench.ask(model)
        usual = num_calls()
        for _ in range(rounds):
            try:
                with workers.interrupt_at_call(chance.randrange(1, usual)):
                    bench.ask(model)
            except KeyboardInterrupt:
                result["interrupted"] += 1
            result["outcomes"].append(bench.ask(model))
        result["elsewhere"] = _in_another_thread(bench, model)
    return result
