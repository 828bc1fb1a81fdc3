"""Trains once, and once more killed at one point after the other, each time run again."""

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import train.pipeline
from collect.traces import TraceWriter
from configs.program import run_program
from tests.builders.killing import in_a_child, kill_before
from tests.builders.recordable import prompts_file, recordable
from train.checkpoint import SafeCheckpointIO
from train.reuse import ReuseStack
from zoo.digest import hash_bytes
from zoo.entry import open_entry

POINTS: dict[str, tuple[Any, str, int]] = {
    "recording": (TraceWriter, "write", 0),
    "checkpoint": (SafeCheckpointIO, "save_checkpoint", 3),
    "epoch-of-next-kind": (ReuseStack, "losses", 5),
    "entries": (train.pipeline, "write_entry", 1),
}
"""What is killed, in the order in which a training comes there: before the call, with this number
from 0, of a function."""


def train_in_a_child(folder: Path, arguments: Sequence[str], point: str | None) -> int:
    """Runs `moecast train` in a folder; returns its exit code, negative for a signal."""

    def run() -> None:
        with (folder / "log").open("a") as log:
            os.dup2(log.fileno(), sys.stdout.fileno())
            os.dup2(log.fileno(), sys.stderr.fileno())
        os.chdir(folder)
        if point is not None:
            owner, name, number = POINTS[point]
            kill_before(number, (owner, name))
        code = run_program("train", arguments)
        sys.stdout.flush()
        os._exit(code)

    return in_a_child(run)


def run_both(folder: Path) -> list[dict[str, dict[str, str]]]:
    """Returns the digests of the files of both trainings' predictors.

    They are of one that nothing interrupted, and of one whose command got a SIGKILL at each of
    `POINTS`.
    """
    # In a child: a fork copies no threads of torch.
    assert in_a_child(lambda: recordable(folder / "model", num_layers=5)) == 0
    prompts_file(folder / "prompts.jsonl", count=20)
    arguments = [
        *(f"model.id={folder / 'model'}", "model.name=tiny", "run_dir=run", "data=jsonl"),
        *(f"data.path={folder / 'prompts.jsonl'}", "data.min_chars=1", "data.max_new_tokens=6"),
        *("predictor.width=16", "max_epochs=2", "batch_size=64", "replay_tokens=4", "lr=0.02"),
        *("score_shifted=false", "hardware=rtx3090-pcie4", "other_hardware=rtx4090-pcie4"),
        *("shape=qwen2-moe", "threads=1", "logger=[]", "figures=false"),
    ]
    found: list[dict[str, dict[str, str]]] = []
    for name, points in (("uninterrupted", []), ("killed", list(POINTS))):
        run = folder / name
        run.mkdir()
        for point in points:
            assert train_in_a_child(run, arguments, point) == -signal.SIGKILL, point
        assert train_in_a_child(run, arguments, None) == 0, (run / "log").read_text()[-2000:]
        found.append({})
        for path in sorted((run / "run" / "entries").iterdir()):
            payload = open_entry(path).payload()
            found[-1][path.name] = {file: hash_bytes(data) for file, data in payload.items()}
    return found
