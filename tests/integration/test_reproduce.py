"""`moecast zoo reproduce`: the same training gives the same files, another one does not."""

import json
import shlex
from pathlib import Path

import pytest

from configs.cli import main
from configs.commands import TRAIN, ZOO
from tests.builders.entries import tiny_entry
from tests.builders.traced_model import make_traced_model
from zoo.entry import ZooEntry, open_entry


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, two traces and a run with the entries stride and reuse."""
    folder = tmp_path_factory.mktemp("trained")
    model = make_traced_model(folder, other="other")
    given = [f"model.id={model}", "model.name=tiny", "predictor.width=32", "max_epochs=2"]
    given += [f"trace={folder / 'trace'}", "batch_size=64", "replay_tokens=20", "figures=false"]
    given += ["score_shifted=false", "seed=3", "logger=[]"]
    assert main("train", TRAIN, [*given, "predictor=stride", f"run_dir={folder / 'run'}"]) == 0
    assert main("train", TRAIN, ["reuse", *given, f"run_dir={folder / 'run'}"]) == 0
    return folder


def reproduce(trained: Path, entry: Path, *options: str) -> int:
    own = [f"model={trained / 'tiny'}", f"trace={trained / 'trace'}"]
    chosen = {option.partition("=")[0]: option for option in [*own, *options]}
    return main("zoo", ZOO, ["reproduce", str(entry), *chosen.values()])


@pytest.mark.parametrize("kind", ["stride", "reuse"])
def test_reproduce__gives_the_same_files(trained, tmp_path, kind, capsys):
    entry = trained / "run/entries" / kind
    assert reproduce(trained, entry, f"run_dir={tmp_path / 'again'}") == 0
    assert "was reproduced" in capsys.readouterr().out
    results = json.loads((tmp_path / "again/results.json").read_text())
    assert results["files"]
    assert results["changes"] == []


def test_reproduce__tells_files_that_differ(trained, tmp_path, monkeypatch, capsys):
    entry = trained / "run/entries/stride"
    record = open_entry(entry).training()
    changes = {"options": {**record.options, "seed": 4}, "python": "2.7"}
    changed = record.model_copy(update=changes)
    monkeypatch.setattr(ZooEntry, "training", lambda _: changed)
    assert reproduce(trained, entry, f"run_dir={tmp_path / 'again'}") == 1
    output = capsys.readouterr()
    assert "differ from those of the repeated training" in output.err
    assert "was 2.7" in output.err
    metrics = output.out.partition(", repeated")[2]
    assert "accuracy" in metrics
    assert "fetch rate" not in metrics  # it depends on how fast the machine is


@pytest.mark.parametrize("kind", ["stride", "reuse"])
def test_reproduce__finds_the_trace_by_its_digest_and_records_none(
    trained, tmp_path, kind, monkeypatch
):
    """Of the traces of the model, whatever options they were recorded with."""
    monkeypatch.chdir(tmp_path)
    traces = tmp_path / "runs/traces/tiny"
    traces.mkdir(parents=True)
    (traces / "another").symlink_to(trained / "other")
    (traces / "own").symlink_to(trained / "trace")
    (traces / "torn").mkdir()
    (traces / "torn/trace.json").write_text("{")
    entry = trained / "run/entries" / kind
    arguments = ["reproduce", str(entry), f"model={trained / 'tiny'}"]
    assert main("zoo", ZOO, arguments) == 0
    assert sorted(path.name for path in traces.iterdir()) == ["another", "own", "torn"]


def test_reproduce__trains_in_a_new_folder_only(trained, capsys):
    """A finished training would be resumed, so that its files are compared with themselves."""
    entry = trained / "run/entries/stride"
    before = (trained / "run/run.json").read_bytes()
    assert reproduce(trained, entry, f"run_dir={trained / 'run'}") == 2
    assert "has a training already" in capsys.readouterr().err
    assert (trained / "run/run.json").read_bytes() == before


def test_reproduce__without_the_prompts_names_the_command(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    entry = trained / "run/entries/stride"
    record = open_entry(entry).training()
    data = {**record.options["data"], "kind": "JSONL", "name": "own", "path": "my prompts.jsonl"}
    changed = record.model_copy(
        update={
            "options": {**record.options, "data": data},
            "trace": record.trace.model_copy(
                update={"was_named": False, "recording": {"new_tokens": 7, "seed": 5}}
            ),
        }
    )
    monkeypatch.setattr(ZooEntry, "training", lambda _: changed)
    assert main("zoo", ZOO, ["reproduce", str(entry), f"model={trained / 'tiny'}"]) == 2
    command = capsys.readouterr().err.partition("moecast collect ")[2]
    arguments = shlex.split(command)
    assert arguments[0] == str(trained / "tiny")
    assert {"data=jsonl", "data.name=own", "data.path=my prompts.jsonl"} <= set(arguments)
    assert {"data.max_new_tokens=7", "seed=5"} <= set(arguments)


def test_reproduce__needs_the_record_and_the_trace(trained, tmp_path, capsys):
    tiny_entry(tmp_path / "early")
    entry = trained / "run/entries/stride"
    own = f"run_dir={tmp_path / 'again'}"
    for arguments, message in (
        ([str(tmp_path / "early")], "has no training.json"),
        ([str(entry)], "give it with trace=PATH"),
        (
            [str(entry), f"model={trained / 'tiny'}", f"trace={trained / 'other'}"],
            "tokens of synthetic), and",
        ),
    ):
        assert main("zoo", ZOO, ["reproduce", *arguments, own]) == 2
        assert message in capsys.readouterr().err.splitlines()[-1]
