"""`launcher=` as its user sees it: the same digests from every launcher."""

import json
from pathlib import Path

import pytest

from collect.traces import Trace
from tests.builders.processes import run_python
from tests.builders.recordable import prompts_file, recordable
from tests.builders.stores import s3_bucket
from tests.docs.tested_commands import read_block

ENGINES = {
    "one": ["launcher=local"],
    "two": ["launcher=local", "launcher.workers=2"],
    "slurm": ["launcher=slurm", "launcher.workers=2", "launcher.cluster=local"],
    "ray": ["launcher=ray", "launcher.workers=2"],
}


def run(program: str, *options: str, run_dir: Path) -> dict:
    command = ("-m", program, "launcher.threads=1", *options, f"run_dir={run_dir}")
    environment = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    run_python(*command, environment=environment, timeout=900)
    return json.loads((run_dir / "results.json").read_text())


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
    found = {}
    for name, engine in engines.items():
        given = [*recording, *engine, f"output={tmp_path / name}"]
        found[name] = run("collect", *given, run_dir=tmp_path / f"r{name}")
    with s3_bucket(tmp_path.name, monkeypatch) as bucket:
        where = [f"output={bucket}/trace", *ENGINES["two"]]
        found["s3"] = run("collect", *recording, *where, run_dir=tmp_path / "rs3")
        assert Trace.open(f"{bucket}/trace").digest == found["one"]["digest"]
    assert len({one["digest"] for one in found.values()}) == 1
    assert found["one"]["launched"] is None
    for name in ("two", "slurm", "ray", "s3"):
        units = found["two"]["launched"]["units"]
        assert found[name]["launched"] == {"units": units, "retried": 0}
    # Once more: it is there, and no worker is started.
    given = [*recording, *ENGINES["ray"], f"output={tmp_path / 'one'}"]
    again = run("collect", *given, run_dir=tmp_path / "again")
    assert again["launched"] is None
    assert again["digest"] == found["one"]["digest"]
