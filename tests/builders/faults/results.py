"""Writes results of a batch run in processes that are killed at a chosen system call."""

import json
from functools import partial
from pathlib import Path
from typing import Any

from runtime.generation.batch import result_journal
from runtime.generation.batch.result_journal import BatchResult, ResultJournal
from tests.builders.faults.bench import Bench
from tests.builders.faults.syscalls import ENDED, killed

IDS = list(range(6))
CALLS = ("write", "fsync", "rename", "ftruncate", "openat")


def results_are_killed(bench: Bench, *, folder: str) -> dict[str, Any]:
    """SIGKILL at the n-th system call of each kind, until a run comes to its end; after each kill
    the file holds whole lines and at most one torn one, and the next run completes it."""
    result: dict[str, Any] = {"kills": 0, "wrong": []}
    for name in CALLS:
        call = 1
        while True:
            path = Path(folder) / f"{name}-{call}" / "out.jsonl"
            path.parent.mkdir()
            spec, log = f"{name}:signal=SIGKILL:when={call}", path.parent / ".strace.log"
            status = killed(spec, partial(_complete, path), log=log)
            if status is not None:
                break
            result["kills"] += 1
            _complete(path)
            # Once more, over a line that a power cut has left torn.
            path.write_bytes(path.read_bytes()[:-5])
            _complete(path)
            found = [json.loads(line)["id"] for line in path.read_text().splitlines()]
            left = sorted(file.name for file in path.parent.iterdir() if file.name[0] != ".")
            if sorted(found) != IDS or left != ["out.jsonl", "out.jsonl.settings.json"]:
                result["wrong"].append(f"{name} {call}: {found} {left}")
            call += 1
        if status != ENDED:
            return {"skip": status}
    return result


def _complete(path: Path) -> None:
    result_journal.SYNC_SECONDS = 0.0  # a kill at every flush
    with ResultJournal(path, {"input": "x"}, known=IDS) as journal:
        for own in IDS:
            if own not in journal.done:
                journal.append(BatchResult(own, "text " * own, [own] * 3, "length"))
