"""Comparing versions, and moving aliases through a gate."""

import json
import shlex
from pathlib import Path

from tests.builders.entries import tiny_entry, tiny_spec
from tests.builders.zoos import Refused, zoo
from zoo.catalog import Zoo
from zoo.load import find_entry
from zoo.manifest import EntryManifest


def version(folder: Path, accuracy: float | None, **changes: object) -> EntryManifest:
    layers = {"accuracy": [None, accuracy], "latency_us": {"1": {"layer_p50": 20.0}, "8": None}}
    metrics = {"held_out": {"accuracy": accuracy, "joint": 0.5}, "layers": layers}
    return tiny_entry(folder, metrics=metrics, **changes)


def test_compare__has_metrics_costs_and_layers_and_their_differences(tmp_path, capsys):
    version(tmp_path / "a", 0.75)
    version(tmp_path / "b", 0.5, trace_digest="b" * 64)
    assert zoo("compare", tmp_path / "a", tmp_path / "b", "json=true") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["held_out"] == {"accuracy": [0.75, 0.5, -0.25], "joint": [0.5, 0.5, 0.0]}
    assert found["costs"]["us a layer, batch 1"] == [20.0, 20.0, 0.0]
    assert found["accuracy_by_layer"] == {"1": [0.75, 0.5, -0.25]}
    assert not found["same_trace"]
    assert zoo("compare", tmp_path / "a", tmp_path / "b") == 0
    assert "different traces" in capsys.readouterr().out


def test_compare__survives_tables_that_someone_else_wrote(tmp_path: Path) -> None:
    version(tmp_path / "a", 0.75)
    strange = {"accuracy": 3, "latency_us": {"1": 7}}
    tiny_entry(tmp_path / "b", metrics={"held_out": {"accuracy": 0.5}, "layers": strange})
    assert zoo("compare", tmp_path / "a", tmp_path / "b") == 0


def test_compare__refuses_entries_of_two_models(tmp_path: Path, refused: Refused) -> None:
    version(tmp_path / "a", 0.75)
    version(tmp_path / "b", 0.75, spec=tiny_spec(model_id="other"))
    error = refused("compare", tmp_path / "a", tmp_path / "b")
    assert "model_id" in error
    assert "moecast zoo list" in error


def test_promote__moves_the_alias_unless_a_metric_falls_too_far(tmp_path, capsys):
    target = f"memory://{tmp_path.name}/zoo"
    good, similar = version(tmp_path / "1", 0.9), version(tmp_path / "2", 0.895)
    worse, unmeasured = version(tmp_path / "3", 0.88), version(tmp_path / "4", None)
    for number in "1234":
        assert zoo("push", tmp_path / number, f"zoo={target}") == 0

    def promote(entry: EntryManifest, *options: str) -> int:
        name = f"tiny/stride@{entry.digest[:12]}"
        return zoo("promote", name, "production", f"zoo={target}", *options)

    def promoted() -> str:
        return Zoo.at(target).read_index().entries["tiny/stride"].aliases["production"]

    assert promote(worse) == 0, "nothing has the alias yet"
    assert promote(good) == promote(similar) == 0
    assert promoted() == similar.digest
    capsys.readouterr()
    for refused, figures in ((worse, "accuracy 0.8800, was 0.8950"), (unmeasured, "not measured")):
        assert promote(refused) == 2
        error = capsys.readouterr().err
        assert figures in error
        assert "joint" not in error
        assert promoted() == similar.digest
        assert zoo(*shlex.split(error.strip().rpartition("All figures: moecast zoo ")[2])) == 0
    assert promote(worse, "max_drop=0.05") == 0
    assert promoted() == worse.digest


def test_alias__is_pulled_with_its_version_and_works_offline(tmp_path: Path) -> None:
    """After `pull NAME@production`, `predictor=NAME@production` needs no zoo."""
    far = f"zoo={tmp_path / 'far'}"
    first = version(tmp_path / "1", 0.9)
    version(tmp_path / "2", 0.91)
    assert zoo("push", tmp_path / "1", far, "alias=production") == 0
    assert zoo("push", tmp_path / "2", far) == 0
    assert zoo("pull", "tiny/stride@production", far) == 0
    assert find_entry("tiny/stride@production").manifest == first
    # The version is there already, and the alias is new.
    assert zoo("promote", f"tiny/stride@{first.digest}", "candidate", far, "max_drop=1") == 0
    assert zoo("pull", "tiny/stride@candidate", far) == 0
    assert find_entry("tiny/stride@candidate").manifest == first


def test_push__of_a_run_without_entries_says_so(tmp_path: Path, refused: Refused) -> None:
    (tmp_path / "run/entries").mkdir(parents=True)
    assert "a run without entries" in refused("push", tmp_path / "run")
