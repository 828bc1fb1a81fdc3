"""Names, addresses, lock files, mirrors, lists: the zoo as people use it."""

import json
from pathlib import Path

import pytest

from tests.builders.entries import tiny_entry
from tests.builders.processes import run_python
from tests.builders.web import served
from tests.builders.zoos import Far, zoo
from zoo.catalog import WritableZoo, Zoo
from zoo.entry import open_entry
from zoo.errors import ZooError
from zoo.index import EntryReference
from zoo.load import find_entry
from zoo.storage import cache_storage
from zoo.storage.folder import FolderStorage

# ---- names and addresses


def test_configured_zoos__are_searched_in_order_and_pulled(
    far: Far, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    address, site = far
    tiny_entry(tmp_path / "m", name="tiny/mlp", kind="mlp")
    assert zoo("push", tmp_path / "m", f"zoo={tmp_path / 'first'}") == 0
    tiny_entry(tmp_path / "o", name="tiny/stride", licence="MIT")
    assert zoo("push", tmp_path / "o", f"zoo={tmp_path / 'last'}") == 0
    monkeypatch.setenv("MOECAST_ZOO", f"{tmp_path / 'first'}, {address},{tmp_path / 'last'}")
    assert find_entry("tiny/stride").manifest.licence == "Apache-2.0"
    assert (
        f"pulling tiny/stride@{find_entry('tiny/stride').manifest.digest[:12]} from {address}"
        in (capfd.readouterr().err)
    )
    assert find_entry("tiny/mlp").manifest.kind == "mlp"
    asked = site.gets["index.json"]
    find_entry("tiny/stride")
    assert site.gets["index.json"] == asked


def test_address__names_zoo_and_entry(far: Far, tmp_path: Path) -> None:
    address, site = far
    digest = Zoo(FolderStorage(site.folder)).read_index().resolve(EntryReference("tiny/stride"))
    for reference in (f"{address}#tiny/stride", f"{address}#tiny/stride@{digest}"):
        assert find_entry(reference).manifest.digest == digest
    site.folder = tmp_path  # the zoo is gone: what names one digest is here all the same
    assert find_entry(f"{address}#tiny/stride@{digest}").manifest.digest == digest
    with pytest.raises(ZooError, match="is not a zoo"):
        find_entry(f"{address}#tiny/stride")


# ---- the same again later


def test_lock__pulls_the_same_bytes_later(
    far: Far, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, site = far
    monkeypatch.setenv("MOECAST_ZOO", address)
    digest = find_entry("tiny/stride").manifest.digest
    assert zoo("lock", f"output={tmp_path / 'zoo.lock'}") == 0
    pins = json.loads((tmp_path / "zoo.lock").read_text())["entries"]
    assert pins == {"tiny/stride": {"digest": digest, "zoo": address}}
    tiny_entry(tmp_path / "2", licence="MIT")
    WritableZoo(FolderStorage(site.folder)).add(open_entry(tmp_path / "2"))
    monkeypatch.delenv("MOECAST_ZOO")
    monkeypatch.setenv("MOECAST_CACHE", str(tmp_path / "another machine"))
    assert zoo("pull", f"locked={tmp_path / 'zoo.lock'}") == 0
    assert find_entry("tiny/stride").manifest.digest == digest


def test_lock__names_the_first_zoo_that_has_an_entry(far: Far, tmp_path: Path) -> None:
    address, site = far
    lockfile = tmp_path / "zoo.lock"

    def locked(*arguments: object) -> dict[str, str]:
        assert zoo("lock", f"output={lockfile}", *arguments) == 0
        entries = json.loads(lockfile.read_text())["entries"]
        return {name: entry["zoo"] for name, entry in entries.items()}

    assert zoo("pull", "tiny/stride", f"zoo={address}") == 0
    assert locked(f"zoo={site.folder},{address}") == {"tiny/stride": str(site.folder)}
    names = "names=[qwen2-moe-tiny/stride,tiny/stride]"
    found = locked(names, "zoo=builtin," + address)
    assert found == {"qwen2-moe-tiny/stride": "builtin", "tiny/stride": address}


def test_lock__of_an_entry_that_is_in_no_zoo_is_refused(
    far: Far, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_entry(tmp_path / "own", licence="MIT")
    assert zoo("push", tmp_path / "own") == 0
    assert zoo("lock", f"output={tmp_path / 'zoo.lock'}") == 2
    assert "not in the built-in zoo or MOECAST_ZOO" in capsys.readouterr().err
    assert zoo("lock", f"output={tmp_path / 'zoo.lock'}", f"zoo={far[0]}") == 2
    assert f"not in {far[0]}" in capsys.readouterr().err
    assert not (tmp_path / "zoo.lock").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "moecast zoo lock writes it"), ("{", "is not a lock file"),
     ('{"entries": {"../x": {"digest": "' + "a" * 64 + '", "zoo": "x"}}}', "String should match")],
)  # fmt: skip
def test_invalid_lock_file__is_refused(
    content: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "zoo.lock").write_text(content)
    assert zoo("pull", f"locked={tmp_path / 'zoo.lock'}", "zoo=builtin") == 2
    assert message in capsys.readouterr().err


def test_mirror__has_every_version(far: Far, tmp_path: Path) -> None:
    address, site = far
    tiny_entry(tmp_path / "2", licence="MIT")
    tiny_entry(tmp_path / "m", name="tiny/mlp", kind="mlp")
    for folder in ("2", "m"):
        WritableZoo(FolderStorage(site.folder)).add(open_entry(tmp_path / folder))
    assert zoo("pull", "all=true", f"zoo={address}") == 0
    near, there = Zoo(cache_storage()).read_index(), Zoo(FolderStorage(site.folder)).read_index()
    assert {name: {*one.versions} for name, one in near.entries.items()} == {
        name: {*one.versions} for name, one in there.entries.items()
    }
    assert all(near.entries[name].latest == one.latest for name, one in there.entries.items())


@pytest.mark.parametrize("arguments", [[], ["tiny/stride", "all=true"]])
def test_pull__takes_one_selection(arguments: list[str]) -> None:
    assert zoo("pull", "zoo=builtin", *arguments) == 2


# ---- making, cleaning


def test_push__makes_a_zoo_of_a_folder_that_any_web_server_shows(tmp_path: Path) -> None:
    tiny_entry(tmp_path / "all/a", created="2026-01-01T00:00:00+00:00")
    new = tiny_entry(tmp_path / "all/b", licence="MIT", created="2026-02-01T00:00:00+00:00")
    tiny_entry(tmp_path / "all/c", name="tiny/mlp", kind="mlp")
    assert zoo("push", tmp_path / "all", f"zoo={tmp_path / 'zoo'}") == 0
    with served(tmp_path / "zoo") as (address, _):
        assert find_entry(f"{address}#tiny/stride").manifest == new
        assert zoo("list", f"zoo={address}", "model=tiny", f"run_dir={tmp_path / 'r'}") == 0
    rows = json.loads((tmp_path / "r/results.json").read_text())["entries"]
    assert sorted(one["name"] for one in rows) == ["tiny/mlp", "tiny/stride"]
    assert zoo("push", tmp_path / "nothing", f"zoo={tmp_path / 'zoo'}") == 2
    (tmp_path / "empty").mkdir()
    assert zoo("push", tmp_path / "empty", f"zoo={tmp_path / 'zoo'}") == 2


LEFT_OF_A_KILLED_PUSH = (
    "blobs/sha256/.x.another-host.7.abcd.tmp",
    ".index.json.another-host.7.abcd.tmp",
    "signatures/.x.another-host.7.abcd.tmp",
    f"signatures/{'0' * 64}.json",
)


def test_rm_and_gc__remove_unreferenced_blobs(tmp_path: Path) -> None:
    first = tiny_entry(tmp_path / "1")
    second = tiny_entry(tmp_path / "2", licence="MIT")
    assert zoo("push", tmp_path / "1") == 0
    assert zoo("push", tmp_path / "2") == 0
    assert zoo("rm", f"tiny/stride@{second.digest}") == 0
    assert find_entry("tiny/stride").manifest == first
    left = [cache_storage().folder / path for path in LEFT_OF_A_KILLED_PUSH]
    for path in left:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x")
    assert zoo("gc") == 0
    assert not any(path.exists() for path in left)
    named = {first.digest, *(one.sha256 for one in first.files.values())}
    assert set(cache_storage().names("blobs/sha256")) == named
    assert zoo("rm", "tiny/stride") == 0
    assert zoo("gc") == 0
    assert cache_storage().names("blobs/sha256") == []
    assert zoo("rm", "tiny/stride") == 2


@pytest.mark.parametrize(
    ("filters", "names"),
    [
        (["metric=accuracy"], ["tiny/b", "tiny/a"]),
        (["metric=good_pred"], ["tiny/a", "tiny/b"]),
        (["model=other*"], []),
        (["model=TINY"], ["tiny/b", "tiny/a"]),
    ],
)
def test_list__filters_and_sorts(
    filters: list[str], names: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = {"a": (0.8, 0.5, "mlp"), "b": (0.9, 0.4, "stride")}
    for name, (accuracy, good, kind) in figures.items():
        held_out = {"accuracy": accuracy, "good_pred": good}
        tiny_entry(tmp_path / name, name=f"tiny/{name}", kind=kind, metrics={"held_out": held_out})
        assert zoo("push", tmp_path / name, f"zoo={tmp_path / 'zoo'}") == 0
    capsys.readouterr()
    assert zoo("list", f"zoo={tmp_path / 'zoo'}", "json=true", *filters) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in printed["entries"]] == names


# ---- nothing is unpickled


def test_loading__unpickles_nothing(tmp_path: Path) -> None:
    """Publish, pull, load and forecast under an audit hook that sees every pickle."""
    code = f"""
import fractions, pickle, sys
from pathlib import Path
seen = []
sys.addaudithook(lambda event, args: seen.append(args) if event == "pickle.find_class" else None)
from tests.unit.zoo.test_load import mlp_entry
from tests.builders.zoos import zoo
from tests.builders.entries import tiny_spec
from zoo.load import load_predictor
folder = Path({str(tmp_path)!r})
mlp_entry(folder / "e")
assert zoo("push", folder / "e", f"zoo={{folder / 'far'}}") == 0
assert zoo("pull", "tiny/mlp", f"zoo={{folder / 'far'}}") == 0
load_predictor("tiny/mlp", spec=tiny_spec())
assert seen == [], seen
pickle.loads(pickle.dumps(fractions.Fraction(1, 2)))
assert seen, "the hook sees none"
"""
    run_python("-c", code)
