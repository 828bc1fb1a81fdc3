"""Measures launchers: equal traces and weights, two workers against one, killed workers, extras.

python -m benchmarks.launchers output=benchmarks/results/launchers.json

One thread in each worker; only routing is recorded, so that the disk hardly matters. quick=true
takes a tenth of the prompts and one repetition; without=ray,slurm leaves engines out. Each part is
written as soon as it is measured; only=core,engines,second_worker,killed,train measures some of
them again. Takes a quarter of an hour on two cores.
"""

import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import psutil
import torch

from collect.config import DataConfig
from collect.launch.config import LauncherConfig, LauncherKind
from collect.launch.pool import WorkerPool
from collect.record import PLAN, collect, record_with
from collect.recording import RecordingJob, recording_settings
from collect.traces.layout import ROUTING_SIGNALS
from predictors.files import write_json
from runtime.config import ModelConfig

MODEL = ModelConfig(dtype="float32")
"""The reference model as `model=qwen2-moe-tiny` computes it."""
PROMPTS = 192
PART_BYTES = 192 << 10
"""Of a part's rows: some thousand tokens, about two seconds of one core."""
REPETITIONS = 3
KILL_EVERY_SECONDS = 5.0
ENGINES = {
    "local, 1 worker": LauncherConfig(threads=1),
    "local, 2 workers": LauncherConfig(workers=2, threads=1),
    "slurm (submitit's local executor), 2 workers": LauncherConfig(
        kind=LauncherKind.SLURM, workers=2, threads=1, cluster="local"
    ),
    "ray, 2 workers": LauncherConfig(kind=LauncherKind.RAY, workers=2, threads=1),
}
ADDED = ("ray", "submitit", "cloudpickle", "msgpack", "jsonschema", "jsonschema-specifications")
ADDED += ("referencing", "rpds-py")
"""What the extras ray and slurm install beside the core."""


@dataclass(frozen=True)
class RecordedTrace:
    """One trace by one launcher."""

    digest: str
    start_seconds: float
    """Until a worker has loaded its model and planned the trace."""
    seconds: float
    """From the plan to the last unit."""
    parts: int
    retried: int
    replaced: int
    """Workers that were killed."""


def make_job(folder: Path, *, num_prompts: int) -> RecordingJob:
    data = DataConfig(num_prompts=num_prompts, max_prompt_tokens=128, new_tokens=16)
    settings = replace(recording_settings(data, batch_size=16), shard_bytes=PART_BYTES)
    return RecordingJob(MODEL, data, str(folder), ROUTING_SIGNALS, settings, "100%")


def record(
    job: RecordingJob, launcher: LauncherConfig, logs: Path, *, kills: bool = False
) -> RecordedTrace:
    """Records with workers even if it is one; `kills`: one of them every five seconds."""
    arguments = {"job": job.to_json()}
    killed: list[int] = []
    stop = threading.Event()
    started = time.perf_counter()
    with WorkerPool(launcher, "collect.record:open_recording", arguments, logs=logs) as pool:
        pool.run([PLAN])
        ready = time.perf_counter()
        if kills:
            threading.Thread(target=kill_workers, args=(killed, stop), daemon=True).start()
        trace = record_with(pool, job)
        ended = time.perf_counter()
        stop.set()
    return RecordedTrace(
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


def engines(folder: Path, *, num_prompts: int, left_out: list[str]) -> dict[str, dict[str, Any]]:
    found = {}
    for number, (name, launcher) in enumerate(ENGINES.items()):
        if launcher.kind.value in left_out:
            continue
        job = make_job(folder / f"engine-{number}", num_prompts=num_prompts)
        found[name] = vars(record(job, launcher, folder / f"logs-{number}"))
        say(f"{name}: {found[name]}")
    here = make_job(folder / "here", num_prompts=num_prompts)
    trace = collect(here.model, here.data, folder=here.where, signals=here.signals,
                    settings=here.settings)  # fmt: skip
    found["this process"] = {"digest": trace.digest}
    return found


def second_worker(folder: Path, *, num_prompts: int, repetitions: int) -> dict[str, Any]:
    """One and two workers in turn."""
    seconds: dict[int, list[float]] = {1: [], 2: []}
    for repetition in range(repetitions):
        for workers in seconds:
            name = f"worker-{repetition}-{workers}"
            launcher = LauncherConfig(workers=workers, threads=1)
            job = make_job(folder / name, num_prompts=num_prompts)
            seconds[workers].append(record(job, launcher, folder / f"logs-{name}").seconds)
            say(f"{workers} workers: {seconds[workers][-1]} s")
    one, two = (statistics.median(seconds[workers]) for workers in (1, 2))
    return {"seconds": seconds, "speedup": round(one / two, 3)}


def trained(folder: Path, *, num_prompts: int, epochs: int) -> dict[str, Any]:
    """All networks together in one process, and by groups of layers in two."""
    data = DataConfig(num_prompts=num_prompts, max_prompt_tokens=128, new_tokens=16)
    trace = collect(MODEL, data, folder=folder / "trace")
    found = {}
    for name, options in {
        "together": ["launcher.workers=1"],
        "by groups, 2 workers": ["launcher.workers=2", "launcher.threads=1"],
    }.items():
        run_dir = folder / name.replace(" ", "-").replace(",", "")
        done = subprocess.run(
            [
                *(sys.executable, "-m", "train", "predictor=mlp", f"trace={trace.path}"),
                *(f"max_epochs={epochs}", "threads=1", "score_shifted=false", "replay_tokens=20"),
                *(f"run_dir={run_dir}", *options),
            ],
            check=False,
            capture_output=True,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        if done.returncode:
            raise RuntimeError(f"train, {name}: {done.stderr.strip().splitlines()[-1]}")
        results = json.loads((run_dir / "results.json").read_text())
        found[name] = {
            "weights_digest": results["training"]["weights_digest"],
            "seconds": results["training"]["seconds"],
        }
        say(f"train, {name}: {found[name]}")
    return found


def core() -> dict[str, Any]:
    """What the core pays: seconds of `--help`, and what of the engines it imports.

    And the size of what the extras install, that the core does without.
    """
    program = (
        "import sys, runpy; sys.argv = ['collect', '--help']\n"
        "try: runpy.run_module('collect', run_name='__main__')\n"
        "except SystemExit: pass\n"
        "print('|', *sorted({'ray', 'submitit'} & set(sys.modules)))"
    )
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        seconds.append(time.perf_counter() - started)
    sizes = {}
    for name in ADDED:
        try:
            files = distribution(name).files or []
        except PackageNotFoundError:
            continue
        paths = [Path(str(file.locate())) for file in files]
        sizes[name] = sum(path.stat().st_size for path in paths if path.is_file())
    return {
        "help_seconds": round(statistics.median(seconds), 3),
        "imports": done.stdout.rpartition("|")[2].split(),
        "extra_bytes": sizes,
    }


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def killed(folder: Path, *, num_prompts: int) -> dict[str, Any]:
    """Two workers, of which one dies every few seconds."""
    job = make_job(folder / "killed", num_prompts=num_prompts)
    launcher = LauncherConfig(workers=2, threads=1, retries=99)
    found = vars(record(job, launcher, folder / "logs-killed", kills=True))
    return {"every_seconds": KILL_EVERY_SECONDS, **found}


def main(arguments: dict[str, str]) -> None:
    quick = arguments.get("quick") == "true"
    num_prompts = PROMPTS // 10 if quick else PROMPTS
    repetitions = 1 if quick else REPETITIONS
    left_out = arguments.get("without", "").split(",")
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)  # this process, too, has read the environment before
    output = Path(arguments["output"])
    with tempfile.TemporaryDirectory(dir=arguments.get("folder")) as temporary:
        folder = Path(temporary)
        measures: dict[str, Callable[[], dict[str, Any]]] = {
            "core": core,
            "engines": partial(engines, folder, num_prompts=num_prompts, left_out=left_out),
            "second_worker": partial(
                second_worker, folder, num_prompts=num_prompts, repetitions=repetitions
            ),
            "killed": partial(killed, folder, num_prompts=num_prompts),
            "train": partial(
                trained, folder, num_prompts=32 if quick else 256, epochs=1 if quick else 3
            ),
        }
        for name in arguments.get("only", ",".join(measures)).split(","):
            found = measures[name]()
            say(f"{name}: {json.dumps(found)}")
            report = json.loads(output.read_text()) if output.exists() else {}
            report |= {
                "machine": {"cores": os.cpu_count(), "platform": platform.platform()},
                "prompts": num_prompts,
                "repetitions": repetitions,
                name: found,
            }
            write_json(output, report)


if __name__ == "__main__":
    main(dict(argument.split("=", 1) for argument in sys.argv[1:]))
