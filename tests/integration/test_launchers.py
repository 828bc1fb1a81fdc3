"""`launcher=` as its user sees it: the same digests from every launcher, whatever was killed."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from collect.traces import Trace
from runtime.config import ModelConfig
from runtime.store.model_source import identity
from tests.builders.models import tiny_qwen2_moe
from tests.builders.recordable import prompts_file, recordable
from tests.builders.stores import s3_bucket
from tests.builders.traces import make_spec, make_trace
from tests.docs.tested_commands import read_block

ROOT = Path(__file__).parents[2]
ENGINES = {
    "one": ["launcher=local"],
    "two": ["launcher=local", "launcher.workers=2"],
    "slurm": ["launcher=slurm", "launcher.workers=2", "launcher.cluster=local"],
    "ray": ["launcher=ray", "launcher.workers=2"],
}
POLL_SECONDS = 0.1
MOST_KILLS = 4


def started(program: str, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", program, "launcher.threads=1", *options],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(program: str, *options: str, run_dir: Path) -> dict:
    process = started(program, *options, f"run_dir={run_dir}")
    said, _ = process.communicate(timeout=900)
    assert process.returncode == 0, said
    return json.loads((run_dir / "results.json").read_text())


def workers_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    workers = []
    for child in psutil.Process(process.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            if "spawn_main" in " ".join(child.cmdline()):
                workers.append(child)
    return workers


@pytest.fixture
def recording(tmp_path: Path) -> list[str]:
    """Options for a trace of some ten parts."""
    recordable(tmp_path / "model", hidden_size=512, num_layers=4)
    prompts_file(tmp_path / "prompts.jsonl", count=40)
    return [
        *("model.name=tiny", f"model.id={tmp_path / 'model'}", "model.dtype=float32"),
        *("data=jsonl", f"data.path={tmp_path / 'prompts.jsonl'}", "data.min_chars=1"),
        *("data.max_new_tokens=8", "temperature=1", "shard_mib=1", "data.max_prompt_tokens=4000"),
    ]


@pytest.mark.engines
@pytest.mark.timeout(1200)
def test_collect__has_one_digest_from_every_launcher(
    recording: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (documented,) = read_block("distributed.md", "local")
    program, *local = documented.adapt().removeprefix("moecast ").split()
    assert program == "collect"
    engines = ENGINES | {"two": local}
    found = {
        name: run(
            "collect",
            *recording,
            *engine,
            f"output={tmp_path / name}",
            run_dir=tmp_path / f"r{name}",
        )
        for name, engine in engines.items()
    }
    with s3_bucket(tmp_path.name, monkeypatch) as bucket:
        where = [f"output={bucket}/trace", *ENGINES["two"]]
        found["s3"] = run("collect", *recording, *where, run_dir=tmp_path / "rs3")
        assert Trace.open(f"{bucket}/trace").digest == found["one"]["digest"]
    assert len({one["digest"] for one in found.values()}) == 1
    assert found["one"]["launched"] is None
    for name in ("two", "slurm", "ray", "s3"):
        assert found[name]["launched"] == {
            "units": found["two"]["launched"]["units"],
            "retried": 0,
        }
    # Once more: it is there, and no worker is started.
    again = run(
        "collect",
        *recording,
        *ENGINES["ray"],
        f"output={tmp_path / 'one'}",
        run_dir=tmp_path / "again",
    )
    assert again["launched"] is None
    assert again["digest"] == found["one"]["digest"]


@pytest.mark.engines
@pytest.mark.timeout(1200)
def test_train__has_one_digest_from_every_launcher(tmp_path: Path) -> None:
    folder = tiny_qwen2_moe(tmp_path / "tiny", num_layers=4)
    model = ModelConfig(name="tiny", id=str(folder), dtype="float32")
    spec = make_spec(hidden_size=32)
    spec = type(spec)(**{**spec.as_dict(), **identity(folder, model)})
    make_trace(tmp_path / "trace", spec=spec, requests_per_unit=60)
    options = [
        *(f"model.id={folder}", "model.name=tiny", f"trace={tmp_path / 'trace'}"),
        *("predictor=residual", "predictor.width=32", "max_epochs=2", "batch_size=64"),
        *("score_shifted=false", "replay_tokens=12", "threads=1", "launcher.layers=2"),
    ]
    found = {
        name: run("train", *options, *engine, run_dir=tmp_path / name)["training"]
        for name, engine in ENGINES.items()
    }
    assert len({one["weights_digest"] for one in found.values()}) == 1
    assert len({one["validation_accuracy"] for one in found.values()}) == 1
    assert found["ray"]["launched"] == {"units": 3, "retried": 0}


@pytest.mark.engines
def test_collect__killed_workers_lose_nothing(tmp_path: Path) -> None:
    """The reference model in two dozen parts of about a second each."""
    options = [
        *("data.num_prompts=24", "data.max_prompt_tokens=32", "data.max_new_tokens=48"),
        *("shard_mib=1", "batch_size=1", "temperature=1"),
    ]
    whole = run("collect", *options, f"output={tmp_path / 'whole'}", run_dir=tmp_path / "r0")
    chance = random.Random(0)
    folder, run_dir = tmp_path / "killed", tmp_path / "r1"
    process = started(
        "collect",
        *options,
        *ENGINES["two"],
        "launcher.retries=9",
        f"output={folder}",
        f"run_dir={run_dir}",
    )
    kills, at_last = 0, 1
    while True:
        try:
            process.wait(POLL_SECONDS)
            break
        except subprocess.TimeoutExpired:
            # A worker takes seconds to load its model: only while parts are being recorded.
            written = len(list(folder.glob("*.shard.json")))
            workers = workers_of(process)
            if written > at_last and workers and kills < MOST_KILLS:
                chance.choice(workers).send_signal(signal.SIGKILL)
                kills, at_last = kills + 1, written + 1
    assert process.stdout is not None
    assert process.returncode == 0, process.stdout.read()
    results = json.loads((run_dir / "results.json").read_text())
    assert kills >= 1, "it was over too soon"
    assert results["digest"] == whole["digest"], "lost or doubled"
    launched = results["launched"]
    assert launched["units"] == len(list(folder.glob("*.arrow")))
    assert launched["retried"] <= kills
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        path.name for path in (tmp_path / "whole").iterdir()
    )


@pytest.mark.engines
def test_collect__interrupted_leaves_no_worker_and_goes_on(
    recording: list[str], tmp_path: Path
) -> None:
    whole = run("collect", *recording, f"output={tmp_path / 'whole'}", run_dir=tmp_path / "r0")
    options = [*recording, *ENGINES["two"], f"output={tmp_path / 'cut'}"]
    process = started("collect", *options, f"run_dir={tmp_path / 'r1'}")
    deadline = time.monotonic() + 300
    while not list((tmp_path / "cut").glob("*.shard.json")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    workers = workers_of(process)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=240)
    assert process.returncode in (0, 130), said
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert not alive
    again = run("collect", *options, run_dir=tmp_path / "r2")
    assert again["digest"] == whole["digest"]
