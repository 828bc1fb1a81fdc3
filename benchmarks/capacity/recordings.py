"""Disk, files, workers and hours of very long traces, and of training on them."""

import json
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.process import python_module, run_program


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """A recording of prompts with the reference model, on one core."""

    prompts: int
    tokens: int
    num_bytes: int
    parts: int
    cpu_seconds: float
    """Processor time of the whole command, its start included."""


@dataclass(frozen=True, kw_only=True)
class RecordingCost:
    """Costs of a token, from two recordings of different length."""

    bytes_per_token: float
    planned_bytes_per_token: int
    """The recorder's own figure before it starts (`row_bytes`)."""
    core_seconds_per_token: list[float]
    """Differences between the long and the short recording; their median is used."""


def record_prompts(prompts: int, folder: Path) -> RecordedRun:
    """Records prompts with the command, on one core."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run_program(
        [
            *python_module("collect"),
            "qwen2-moe-tiny",
            f"data.num_prompts={prompts}",
            f"output={folder / 'trace'}",
            f"run_dir={folder / 'run'}",
        ],
        environment={"OMP_NUM_THREADS": "1"},
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    results = json.loads((folder / "run" / "results.json").read_text())
    used = [usage.ru_utime + usage.ru_stime for usage in (before, after)]
    return RecordedRun(
        prompts=prompts,
        tokens=results["tokens"],
        num_bytes=results["bytes"],
        parts=len(list((folder / "trace").glob("*.arrow"))),
        cpu_seconds=used[1] - used[0],
    )


def compare_runs(
    pairs: list[tuple[RecordedRun, RecordedRun]], *, planned_bytes_per_token: int
) -> RecordingCost:
    """Returns the costs of a token without those of starting; pairs of a short and a long run."""
    long = pairs[0][1]
    return RecordingCost(
        bytes_per_token=long.num_bytes / long.tokens,
        planned_bytes_per_token=planned_bytes_per_token,
        core_seconds_per_token=[
            (long.cpu_seconds - short.cpu_seconds) / (long.tokens - short.tokens)
            for short, long in pairs
        ],
    )


@dataclass(frozen=True, kw_only=True)
class LongTracePlan:
    """A trace of many tokens."""

    name: str
    tokens: int
    num_bytes: float
    files: int
    core_hours: float | None
    """None: the speed of recording this model was not measured."""


@dataclass(frozen=True, kw_only=True)
class TrainingCost:
    """Speed of a training."""

    what: str
    machine: str
    token_visits: int
    """Tokens that the run was shown, those of every epoch counted."""
    seconds: float


def train_predictors(model: str, trace: str, run_dir: Path) -> list[TrainingCost]:
    """Trains predictors of all kinds on a trace, and returns the speeds.

    Raises:
        ProcessFailed: the training failed.
    """
    options = [f"trace={trace}", f"run_dir={run_dir}", "figures=false", "score_shifted=false"]
    run_program([*python_module("train"), model, "predictor=all", *options])
    return read_training(json.loads((run_dir / "results.json").read_text()))


def read_training(document: dict[str, Any]) -> list[TrainingCost]:
    """Returns the speeds in a training's results: forecasts of all kinds together, and reuse."""
    return [
        TrainingCost(
            what=f"{', '.join(part['kinds'])} ({part['networks']} networks together)",
            machine=document["origin"]["machine"],
            token_visits=part["steps"] * part["batch_size"],
            seconds=part["seconds"],
        )
        for part in (document["training"], document["keeping"]["training"]["reuse"])
    ]
