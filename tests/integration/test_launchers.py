"""`launcher=` as its user sees it: the same digests from every launcher."""

import json

import pytest

from tests.builders.processes import run_python
from tests.builders.recordable import recording_options
from tests.docs.tested_commands import read_block


def run(*options: str, run_dir) -> dict:
    environment = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = ("-m", "collect", *options, f"run_dir={run_dir}")
    run_python(*command, environment=environment, timeout=900)
    return json.loads((run_dir / "results.json").read_text())


@pytest.mark.engines
@pytest.mark.timeout(1200)
def test_collect__has_one_digest_from_every_launcher(tmp_path):
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
    found = {
        name: run(*recording, *engine, f"output={tmp_path / name}", run_dir=tmp_path / f"r{name}")
        for name, engine in engines.items()
    }
    assert len({one["digest"] for one in found.values()}) == 1
    launched = [one["launched"] for one in found.values()]
    assert launched == [None] + [{"units": launched[1]["units"], "retried": 0}] * 3
    # Once more: it is there, and no worker is started.
    given = [*recording, *engines["ray"], f"output={tmp_path / 'one'}"]
    again = run(*given, run_dir=tmp_path / "again")
    assert (again["launched"], again["digest"]) == (None, found["one"]["digest"])
