"""`launcher=` as its user sees it: the same digests from every launcher."""

import json
from pathlib import Path

import pytest

from collect.traces import Trace
from tests.builders.processes import run_python
from tests.builders.recordable import recording_options
from tests.builders.stores import s3_bucket
from tests.docs.tested_commands import read_block


def run(*options: str, run_dir: Path) -> dict:
    environment = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = ("-m", "collect", *options, f"run_dir={run_dir}")
    run_python(*command, environment=environment, timeout=900)
    return json.loads((run_dir / "results.json").read_text())


@pytest.mark.engines
@pytest.mark.timeout(1200)
def test_collect__has_one_digest_from_every_launcher(tmp_path, monkeypatch):
    (documented,) = read_block("distributed.md", "local")
    program, *local = documented.adapt().removeprefix("moecast ").split()
    assert program == "collect"
    engines = {
        "one": ["launcher=local"],
        "two": local,
        "slurm": ["launcher=slurm", "launcher.workers=2", "launcher.cluster=local"],
        "ray": ["launcher=ray", "launcher.workers=2"],
    }
    recording = recording_options(tmp_path)
    found = {}
    for name, engine in engines.items():
        given = [*recording, *engine, f"output={tmp_path / name}"]
        found[name] = run(*given, run_dir=tmp_path / f"r{name}")
    with s3_bucket(tmp_path.name, monkeypatch) as bucket:
        where = [f"output={bucket}/trace", *local]
        found["s3"] = run(*recording, *where, run_dir=tmp_path / "rs3")
        assert Trace.open(f"{bucket}/trace").digest == found["one"]["digest"]
    assert len({one["digest"] for one in found.values()}) == 1
    assert found["one"]["launched"] is None
    for name in ("two", "slurm", "ray", "s3"):
        units = found["two"]["launched"]["units"]
        assert found[name]["launched"] == {"units": units, "retried": 0}
    # Once more: it is there, and no worker is started.
    given = [*recording, *engines["ray"], f"output={tmp_path / 'one'}"]
    again = run(*given, run_dir=tmp_path / "again")
    assert again["launched"] is None
    assert again["digest"] == found["one"]["digest"]
