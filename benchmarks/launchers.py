"""Measures launchers: equal traces and weights, two workers against one, killed workers, extras.

One thread in each worker; only routing is recorded, so that the disk hardly matters. Each part is
written as soon as it is measured. Takes a quarter of an hour on two cores.
"""

import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import psutil
import torch
from pydantic import TypeAdapter

from benchmarks.config import LaunchersConfig
from benchmarks.process import python_module, run_program
from benchmarks.reports import describe_machine, print_line, write_report
from collect.config import DataConfig
from collect.launch.config import LauncherConfig, LauncherKind
from collect.launch.pool import WorkerPool
from collect.record import PLAN, collect, record_with
from collect.recording import RecordingJob, recording_settings
from collect.traces.layout import ROUTING_SIGNALS
from predictors.errors import MoecastError, unknown
from runtime.config import ModelConfig

MODEL = ModelConfig(dtype="float32")
"""The reference model as `model=qwen2-moe-tiny` computes it."""
PROMPTS = 192
PART_BYTES = 192 << 10
"""Size of a part's rows: some thousand tokens, about two seconds of one core."""
REPETITIONS = 3
TRAIN_PROMPTS, TRAIN_EPOCHS = 256, 3
KILL_EVERY_SECONDS = 5.0
LAUNCHERS = {
    "local, 1 worker": LauncherConfig(threads=1),
    "local, 2 workers": LauncherConfig(workers=2, threads=1),
    "slurm (submitit's local executor), 2 workers": LauncherConfig(
        kind=LauncherKind.SLURM, workers=2, threads=1, cluster="local"
    ),
    "ray, 2 workers": LauncherConfig(kind=LauncherKind.RAY, workers=2, threads=1),
}
EXTRA_PACKAGES = (
    "ray", "submitit", "cloudpickle", "msgpack", "jsonschema", "jsonschema-specifications",
    "referencing", "rpds-py",
)  # fmt: skip
"""Packages that the extras ray and slurm add to the core."""
HELP_PROGRAM = (
    "import sys, runpy; sys.argv = ['collect', '--help']\n"
    "try: runpy.run_module('collect', run_name='__main__')\n"
    "except SystemExit: pass\n"
    "print('|', *sorted({'ray', 'submitit'} & set(sys.modules)))"
)


@dataclass(frozen=True, kw_only=True)
class LauncherRun:
    """One trace, recorded by one launcher."""

    digest: str
    start_seconds: float
    """Time until a worker has loaded its model and planned the trace."""
    seconds: float
    """Time from the plan to the last unit."""
    parts: int
    retried: int
    replaced: int
    """Workers that were killed."""


@dataclass(frozen=True, kw_only=True)
class KilledRun(LauncherRun):
    every_seconds: float
    """Time between two kills."""


@dataclass(frozen=True, kw_only=True)
class EngineRuns:
    """The same trace by every launcher."""

    digest: str
    """Digest of the trace that this process records without workers."""
    runs: dict[str, LauncherRun]


@dataclass(frozen=True, kw_only=True)
class SecondWorker:
    seconds: dict[int, list[float]]
    """Recording times by number of workers."""
    speedup: float


@dataclass(frozen=True, kw_only=True)
class TrainedWeights:
    weights_digest: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class CoreCosts:
    """Costs of the launchers for a user without their extras."""

    help_seconds: float
    imports: list[str]
    """Extras that `collect --help` imports."""
    extra_bytes: dict[str, int]
    """Installed size of each package of the extras."""


@dataclass(frozen=True, kw_only=True)
class LaunchersReport:
    machine: dict[str, Any]
    prompts: int
    repetitions: int
    core: CoreCosts | None = None
    engines: EngineRuns | None = None
    second_worker: SecondWorker | None = None
    killed: KilledRun | None = None
    train: dict[str, TrainedWeights] = field(default_factory=dict)


def make_job(folder: Path) -> RecordingJob:
    data = DataConfig(num_prompts=PROMPTS, max_prompt_tokens=128, max_new_tokens=16)
    settings = replace(recording_settings(data, batch_size=16), shard_bytes=PART_BYTES)
    return RecordingJob(MODEL, data, str(folder), ROUTING_SIGNALS, settings, "100%")


def record(
    job: RecordingJob, launcher: LauncherConfig, logs: Path, *, kills: bool = False
) -> LauncherRun:
    """Records with workers, even with one.

    Args:
        job: The recording.
        launcher: The workers.
        logs: Folder for their logs.
        kills: Kill a worker every `KILL_EVERY_SECONDS`.
    """
    killed: list[int] = []
    stop = threading.Event()
    started = time.perf_counter()
    arguments = {"job": job.to_json()}
    with WorkerPool(launcher, "collect.record:open_recording", arguments, logs=logs) as pool:
        pool.run([PLAN])
        ready = time.perf_counter()
        if kills:
            threading.Thread(target=kill_workers, args=(killed, stop), daemon=True).start()
        trace = record_with(pool, job)
        ended = time.perf_counter()
        stop.set()
    return LauncherRun(
        digest=trace.digest,
        start_seconds=round(ready - started, 3),
        seconds=round(ended - ready, 3),
        parts=pool.num_units,
        retried=pool.num_retried,
        replaced=len(killed),
    )


def kill_workers(killed: list[int], stop: threading.Event) -> None:
    """Kills one of launcher=local's processes every few seconds; notes its pid."""
    chance = random.Random(0)
    while not stop.wait(KILL_EVERY_SECONDS):
        children = psutil.Process().children()
        workers = [child for child in children if "spawn_main" in " ".join(child.cmdline())]
        if workers:
            worker = chance.choice(workers)
            killed.append(worker.pid)
            worker.kill()


def measure_launchers(folder: Path, *, without: list[str]) -> EngineRuns:
    runs = {}
    for number, (name, launcher) in enumerate(LAUNCHERS.items()):
        if launcher.kind.value in without:
            continue
        job = make_job(folder / f"engine-{number}")
        runs[name] = record(job, launcher, folder / f"logs-{number}")
        print_line(f"{name}: {runs[name]}")
    job = make_job(folder / "here")
    trace = collect(
        job.model, job.data, folder=job.where, signals=job.signals, settings=job.settings
    )
    return EngineRuns(digest=trace.digest, runs=runs)


def measure_second_worker(folder: Path) -> SecondWorker:
    """Records with one and with two workers, interleaved."""
    seconds: dict[int, list[float]] = {1: [], 2: []}
    for repetition in range(REPETITIONS):
        for workers, times in seconds.items():
            name = f"worker-{repetition}-{workers}"
            launcher = LauncherConfig(workers=workers, threads=1)
            job = make_job(folder / name)
            times.append(record(job, launcher, folder / f"logs-{name}").seconds)
            print_line(f"{workers} workers: {times[-1]} s")
    one, two = (statistics.median(seconds[workers]) for workers in (1, 2))
    return SecondWorker(seconds=seconds, speedup=round(one / two, 3))


def measure_killed(folder: Path) -> KilledRun:
    job = make_job(folder / "killed")
    launcher = LauncherConfig(workers=2, threads=1, retries=99)
    run = record(job, launcher, folder / "logs-killed", kills=True)
    return KilledRun(**vars(run), every_seconds=KILL_EVERY_SECONDS)


def measure_training(folder: Path) -> dict[str, TrainedWeights]:
    """Trains all networks in one process, and by groups of layers in two."""
    data = DataConfig(num_prompts=TRAIN_PROMPTS, max_prompt_tokens=128, max_new_tokens=16)
    trace = collect(MODEL, data, folder=folder / "trace")
    weights = {}
    for name, options in {
        "together": ["launcher.workers=1"],
        "by groups, 2 workers": ["launcher.workers=2", "launcher.threads=1"],
    }.items():
        run_dir = folder / name.replace(" ", "-").replace(",", "")
        run_program(
            [
                *python_module("train"),
                *(
                    "predictor=mlp",
                    f"trace={trace.path}",
                    f"max_epochs={TRAIN_EPOCHS}",
                    "threads=1",
                ),
                *("score_shifted=false", "replay_tokens=20", f"run_dir={run_dir}", *options),
            ],
            environment={"OMP_NUM_THREADS": "1"},
        )
        training = json.loads((run_dir / "results.json").read_text())["training"]
        weights[name] = TrainedWeights(
            weights_digest=training["weights_digest"], seconds=training["seconds"]
        )
        print_line(f"train, {name}: {weights[name]}")
    return weights


def measure_core() -> CoreCosts:
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        output = run_program([sys.executable, "-c", HELP_PROGRAM])
        seconds.append(time.perf_counter() - started)
    sizes = {}
    for name in EXTRA_PACKAGES:
        try:
            files = distribution(name).files or []
        except PackageNotFoundError:
            continue
        paths = [Path(str(file.locate())) for file in files]
        sizes[name] = sum(path.stat().st_size for path in paths if path.is_file())
    return CoreCosts(
        help_seconds=round(statistics.median(seconds), 3),
        imports=output.rpartition("|")[2].split(),
        extra_bytes=sizes,
    )


def run_launchers(config: LaunchersConfig) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)  # torch has read the environment before
    report = LaunchersReport(
        machine=asdict(describe_machine(1)), prompts=PROMPTS, repetitions=REPETITIONS
    )
    if config.output.exists():
        known = TypeAdapter(LaunchersReport).validate_json(config.output.read_bytes())
        report = replace(known, machine=report.machine, prompts=PROMPTS, repetitions=REPETITIONS)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        measures: dict[str, Callable[[], Any]] = {
            "core": measure_core,
            "engines": partial(measure_launchers, folder, without=config.without),
            "second_worker": partial(measure_second_worker, folder),
            "killed": partial(measure_killed, folder),
            "train": partial(measure_training, folder),
        }
        for name in config.part:
            if name not in measures:
                raise MoecastError(unknown("part", name, measures))
        for name in config.part or measures:
            measured: dict[str, Any] = {name: measures[name]()}
            print_line(f"{measured}")
            report = replace(report, **measured)
            write_report(config, report)
