"""Names, addresses, lock files, mirrors, lists: the zoo as people use it."""

import json
from itertools import product
from pathlib import Path

import pytest

from tests.builders.entries import tiny_entry
from tests.builders.processes import run_python
from tests.builders.web import Site, served
from tests.builders.zoos import publish, zoo
from zoo.catalog import WritableZoo, Zoo
from zoo.errors import ZooError
from zoo.index import EntryReference, blob_path
from zoo.load import find_entry, list_names
from zoo.storage import cache_storage
from zoo.storage.folder import FolderStorage

# ---- names and addresses


def test_configured_zoos__are_searched_in_order_and_pulled(far, tmp_path, monkeypatch, capfd):
    publish(tmp_path / "first", name="tiny/mlp", kind="mlp")
    publish(tmp_path / "last", licence="MIT")
    monkeypatch.setenv("MOECAST_ZOO", f"{tmp_path / 'first'}, {far.address},{tmp_path / 'last'}")
    found = find_entry("tiny/stride").manifest
    assert found.licence == "Apache-2.0"
    assert f"pulling tiny/stride@{found.digest[:12]} from {far.address}" in capfd.readouterr().err
    assert find_entry("tiny/mlp").manifest.kind == "mlp"
    asked = far.gets["index.json"]
    find_entry("tiny/stride")
    assert far.gets["index.json"] == asked


def test_address__names_zoo_and_entry(far: Site, tmp_path) -> None:
    digest = Zoo(FolderStorage(far.folder)).read_index().resolve(EntryReference("tiny/stride"))
    for reference in (f"{far.address}#tiny/stride", f"{far.address}#tiny/stride@{digest}"):
        assert find_entry(reference).manifest.digest == digest
    far.folder = tmp_path  # the zoo is gone: what names one digest is here all the same
    assert find_entry(f"{far.address}#tiny/stride@{digest}").manifest.digest == digest
    with pytest.raises(ZooError, match="is not a zoo"):
        find_entry(f"{far.address}#tiny/stride")


def test_address__leaves_what_a_name_means_in_the_cache(tmp_path) -> None:
    """A comparison with a bad version would have had the next server load it."""
    here, there = FolderStorage(tmp_path / "here"), FolderStorage(tmp_path / "there")
    good, bad = publish(here.folder), publish(there.folder, licence="MIT")
    aliases = ("stable", "as-long-as-a-digest".ljust(64, "x"))
    for place, alias in product((here, there), aliases):
        WritableZoo(place).add(Zoo(place).open(EntryReference("tiny/stride")), alias=alias)
    for alias in aliases:
        assert zoo("pull", f"tiny/stride@{alias}", f"zoo={here.folder}") == 0
        found = find_entry(f"file://{there.folder}#tiny/stride@{alias}")
        assert found.manifest.digest == bad.digest
    for name in ("tiny/stride", *(f"tiny/stride@{alias}" for alias in aliases)):
        assert find_entry(name).manifest.digest == good.digest
    assert find_entry(f"tiny/stride@{bad.digest[:12]}").manifest.digest == bad.digest
    assert zoo("pull", "tiny/stride@stable", f"zoo={there.folder}") == 0
    assert find_entry("tiny/stride@stable").manifest.digest == bad.digest


# ---- the same again later


def test_lock__pulls_the_same_bytes_later(far, tmp_path, monkeypatch):
    monkeypatch.setenv("MOECAST_ZOO", far.address)
    digest = find_entry("tiny/stride").manifest.digest
    assert zoo("lock", f"output={tmp_path / 'zoo.lock'}") == 0
    pins = json.loads((tmp_path / "zoo.lock").read_text())["entries"]
    assert pins == {"tiny/stride": {"digest": digest, "zoo": far.address}}
    publish(far.folder, licence="MIT")
    publish(tmp_path / "other", name="tiny/mlp")
    for zoos in ("", str(tmp_path / "other")):
        monkeypatch.setenv("MOECAST_ZOO", zoos)
        monkeypatch.setenv("MOECAST_CACHE", str(tmp_path / f"another machine {zoos[-1:]}"))
        assert zoo("pull", f"locked={tmp_path / 'zoo.lock'}") == 0
        assert find_entry("tiny/stride").manifest.digest == digest


def test_lock__names_the_first_zoo_that_has_an_entry(far: Site, tmp_path, monkeypatch) -> None:
    lockfile = tmp_path / "zoo.lock"

    def locked(*arguments: object) -> dict[str, str]:
        assert zoo("lock", f"output={lockfile}", *arguments) == 0
        entries = json.loads(lockfile.read_text())["entries"]
        return {name: entry["zoo"] for name, entry in entries.items()}

    assert zoo("pull", "tiny/stride", f"zoo={far.address}") == 0
    monkeypatch.chdir(far.folder.parent)
    assert locked(f"zoo={far.folder.name},{far.address}") == {"tiny/stride": str(far.folder)}
    found = locked("names=[qwen2-moe-tiny/stride,tiny/stride]", "zoo=builtin," + far.address)
    assert found == {"qwen2-moe-tiny/stride": "builtin", "tiny/stride": far.address}


def test_lock__of_an_entry_that_is_in_no_zoo_is_refused(far, tmp_path, refused):
    publish(cache_storage(), licence="MIT")
    lock = ("lock", f"output={tmp_path / 'zoo.lock'}")
    assert "not in the built-in zoo or MOECAST_ZOO" in refused(*lock)
    assert f"not in {far.address}" in refused(*lock, f"zoo={far.address}")
    assert not (tmp_path / "zoo.lock").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "moecast zoo lock writes it"), ("{", "is not a lock file"),
     ('{"entries": {"../x": {"digest": "' + "a" * 64 + '", "zoo": "x"}}}', "String should match")],
)  # fmt: skip
def test_invalid_lock_file__is_refused(content, message, tmp_path, refused):
    if content is not None:
        (tmp_path / "zoo.lock").write_text(content)
    assert message in refused("pull", f"locked={tmp_path / 'zoo.lock'}", "zoo=builtin")


def test_mirror__has_every_version_and_prefers_the_first_zoo(far: Site, tmp_path) -> None:
    publish(far.folder, licence="MIT")
    publish(far.folder, name="tiny/mlp", kind="mlp")
    publish(tmp_path / "other", name="tiny/mlp", licence="MIT")
    for folder in (far.folder, tmp_path / "other"):
        assert zoo("promote", "tiny/mlp", "stable", f"zoo={folder}") == 0
    near, there = Zoo(cache_storage()), Zoo(FolderStorage(far.folder))
    assert zoo("pull", "all=true", f"zoo={far.address}") == 0
    assert near.read_index().entries == there.read_index().entries
    assert zoo("pull", "all=true", f"zoo={far.address},{tmp_path / 'other'}") == 0
    mirrored, first = (one.read_index().entries["tiny/mlp"] for one in (near, there))
    assert len(mirrored.versions) == 2
    assert (mirrored.latest, mirrored.aliases) == (first.latest, first.aliases)


# ---- making, cleaning


def test_push__makes_a_zoo_of_a_folder_that_any_web_server_shows(tmp_path) -> None:
    tiny_entry(tmp_path / "all/a", created="2026-01-01T00:00:00+00:00")
    new = tiny_entry(tmp_path / "all/b", licence="MIT", created="2026-02-01T00:00:00+00:00")
    tiny_entry(tmp_path / "all/c", name="tiny/mlp", kind="mlp")
    assert zoo("push", tmp_path / "all", f"zoo={tmp_path / 'zoo'}") == 0
    with served(tmp_path / "zoo") as (address, _):
        assert find_entry(f"{address}#tiny/stride").manifest == new
        assert zoo("list", f"zoo={address}", "model=tiny", f"run_dir={tmp_path / 'r'}") == 0
    rows = json.loads((tmp_path / "r/results.json").read_text())["entries"]
    assert sorted(one["name"] for one in rows) == ["tiny/mlp", "tiny/stride"]


LEFT_OF_A_KILLED_PUSH = (
    "blobs/sha256/.x.another-host.7.abcd.tmp",
    ".index.json.another-host.7.abcd.tmp",
    "signatures/.x.another-host.7.abcd.tmp",
    f"signatures/{'0' * 64}.json",
)


def test_rm_and_gc__remove_unreferenced_blobs() -> None:
    first = publish(cache_storage())
    second = publish(cache_storage(), licence="MIT")
    for version in (second.digest, "latest"):
        publish(cache_storage(), licence="MIT")
        assert zoo("rm", f"tiny/stride@{version}") == 0
        assert find_entry("tiny/stride").manifest == first
    left = [cache_storage().folder / path for path in LEFT_OF_A_KILLED_PUSH]
    for path in left:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x")
    assert zoo("gc") == 0
    assert not any(path.exists() for path in left)
    assert zoo("rm", "tiny/stride") == 0
    assert zoo("gc") == 0
    assert cache_storage().names("blobs/sha256") == []
    assert zoo("rm", "tiny/stride") == 2


LISTED = [
    (["metric=accuracy"], ["tiny/b", "tiny/a"]),
    (["metric=good_pred"], ["tiny/a", "tiny/b"]),
    (["model=other*"], []),
    (["model=TINY"], ["tiny/b", "tiny/a"]),
]


@pytest.mark.parametrize(("filters", "names"), LISTED)
def test_list__filters_and_sorts(filters, names, tmp_path, capsys):
    for name, (accuracy, good, kind) in {"a": (0.8, 0.5, "mlp"), "b": (0.9, 0.4, "stride")}.items():
        metrics = {"held_out": {"accuracy": accuracy, "good_pred": good}}
        publish(tmp_path / "zoo", name=f"tiny/{name}", kind=kind, metrics=metrics)
    capsys.readouterr()
    assert zoo("list", f"zoo={tmp_path / 'zoo'}", "json=true", *filters) == 0
    assert [one["name"] for one in json.loads(capsys.readouterr().out)["entries"]] == names


def test_list__goes_on_without_a_zoo_that_does_not_answer(tmp_path, monkeypatch, capsys, caplog):
    publish(cache_storage())
    monkeypatch.setenv("MOECAST_ZOO", f"https://example.invalid/zoo,{tmp_path / 'none'}")
    monkeypatch.setenv("MOECAST_OFFLINE", "1")
    assert zoo("list", "json=true") == 0
    names = [one["name"] for one in json.loads(capsys.readouterr().out)["entries"]]
    assert "tiny/stride" in names
    assert "example.invalid/zoo is on the network" in caplog.text
    assert "none is not a zoo" in caplog.text
    assert zoo("list", "zoo=https://example.invalid/zoo") == 2


def test_list__by_an_unknown_metric_is_refused(tmp_path, refused) -> None:
    publish(tmp_path)
    assert "metric: unknown metric 'acuracy'. Did you mean 'accuracy'" in refused(
        "list", f"zoo={tmp_path}", "metric=acuracy"
    )


# ---- nothing is unpickled


def test_loading__unpickles_nothing(tmp_path) -> None:
    """Publish, pull, load and forecast under an audit hook that sees every pickle."""
    code = f"""
import fractions, pickle, sys
from pathlib import Path
seen = []
sys.addaudithook(lambda event, args: seen.append(args) if event == "pickle.find_class" else None)
from tests.builders.zoos import zoo
from tests.builders.entries import mlp_entry, tiny_spec
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


# ---- all that a system takes for a model


@pytest.fixture
def zoo_of_models(tmp_path) -> str:
    """A zoo with the pair of system moecast, one of another system, and another model."""
    run = tmp_path / "run"
    for name in ("tiny/residual", "tiny/reuse", "tiny/stride", "half/residual"):
        tiny_entry(run / "entries" / name.replace("/", "-"), name=name)
    address = f"zoo={tmp_path / 'far'}"
    assert zoo("push", run, address, "alias=production") == 0
    return address


def pulled() -> set[str]:
    return {name for name in list_names() if name.startswith(("tiny/", "half/"))}


def test_pull__of_a_model_gets_what_the_system_takes(zoo_of_models: str) -> None:
    assert zoo("pull", "tiny@production", zoo_of_models) == 0
    assert pulled() == {"tiny/residual", "tiny/reuse"}
    for name in pulled():
        find_entry(f"{name}@production").verify()
    assert zoo("pull", "tiny", "system=promoe", zoo_of_models) == 0
    assert "tiny/stride" in pulled()


def test_pull__of_a_model_that_fails_lists_nothing(zoo_of_models: str) -> None:
    far = FolderStorage(Path(zoo_of_models.removeprefix("zoo=")))
    damaged = Zoo(far).read_index().entries["tiny/reuse"].latest
    (far.folder / blob_path(damaged)).write_bytes(b"")
    assert zoo("pull", "tiny", zoo_of_models) == 2
    assert not pulled()


INCOMPLETE = [
    (["half"], "has no half/reuse; one entry is pulled by its name: moecast zoo pull half/"),
    (["nothing"], "unknown zoo entry 'nothing/residual'"),
    (["tiny@12345678"], "names one entry, tiny stands for 2"),
    (["tiny", "system=on-demand"], "'tiny' is not NAME"),
]


@pytest.mark.parametrize(("arguments", "message"), INCOMPLETE)
def test_pull__of_a_model_gets_all_or_nothing(arguments, message, zoo_of_models, refused):
    error = refused("pull", *arguments, zoo_of_models)
    assert message in error
    assert error.count("\n") == 1
    assert not pulled()
