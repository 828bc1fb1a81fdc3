"""Pulls over the loopback: resumed, shared by processes, refused when old or altered."""

import json
import multiprocessing
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from configs.cli import main
from tests.builders.entries import tiny_entry
from tests.builders.web import Site, served
from zoo.__main__ import COMMANDS
from zoo.catalogue import Zoo
from zoo.entry import open_entry
from zoo.errors import DamagedError, StaleError, UnreachableError, ZooError
from zoo.index import Reference, blob
from zoo.load import find, load_predictor, pulled
from zoo.places import FolderPlace, cache
from zoo.places.http import HttpPlace
from zoo.writing import WritableZoo

ROOT = Path(__file__).resolve().parents[3]


def zoo(*arguments: object) -> int:
    return main("zoo", COMMANDS, [str(one) for one in arguments])


@pytest.fixture
def far(tmp_path: Path) -> Iterator[tuple[str, Site]]:
    """A zoo with one entry behind a web server."""
    tiny_entry(tmp_path / "e")
    WritableZoo(FolderPlace(tmp_path / "far")).add(open_entry(tmp_path / "e"))
    with served(tmp_path / "far") as (address, site):
        yield address, site


def files_of(site: Site) -> dict[str, int]:
    """Paths of everything that a pull brings, with their sizes."""
    manifest = Zoo(FolderPlace(site.folder)).open(Reference("tiny/stride")).manifest
    found = {blob(one.sha256): one.size for one in manifest.files.values()}
    return {**found, blob(manifest.digest): len(manifest.to_bytes())}


def tiny(address: str) -> None:
    pulled(HttpPlace(address), Reference("tiny/stride"))


# ---- resuming


@pytest.mark.parametrize("has_ranges", [True, False])
def test_cut_download__goes_on_from_there(has_ranges: bool, far: tuple[str, Site]) -> None:
    address, site = far
    site.has_ranges = has_ranges
    path, size = max(files_of(site).items(), key=lambda one: one[1])
    site.cut[path] = size // 2
    with pytest.raises(UnreachableError):
        tiny(address)
    assert Zoo(cache()).index().entries == {}
    partial = cache().folder / "partial" / path.rpartition("/")[2]
    assert partial.stat().st_size == size // 2
    tiny(address)
    assert site.sent[path] == (size if has_ranges else size // 2 + size)
    find("tiny/stride").verify()
    assert not list(partial.parent.iterdir())


def test_endless_answer__does_not_fill_the_disk(far: tuple[str, Site]) -> None:
    address, site = far
    path, size = max(files_of(site).items(), key=lambda one: one[1])
    (site.folder / path).write_bytes(os.urandom(size + (8 << 20)))
    with pytest.raises(DamagedError, match="is damaged"):
        tiny(address)
    assert not list((cache().folder / "partial").iterdir())


def test_partial_file__of_other_bytes_is_begun_again(far: tuple[str, Site]) -> None:
    address, site = far
    path, size = max(files_of(site).items(), key=lambda one: one[1])
    folder = cache().folder / "partial"
    folder.mkdir(parents=True)
    (folder / path.rpartition("/")[2]).write_bytes(os.urandom(size // 3))
    with pytest.raises(DamagedError):
        tiny(address)
    tiny(address)
    find("tiny/stride").verify()


# ---- several at once


PULLS = """
import sys, time
from pathlib import Path
from zoo.index import Reference
from zoo.load import pulled
from zoo.places.http import HttpPlace
Path(sys.argv[2]).touch()
while not Path(sys.argv[3]).exists():
    time.sleep(0.005)
pulled(HttpPlace(sys.argv[1]), Reference("tiny/stride")).verify()
"""


def test_eight_processes__bring_each_file_once(far: tuple[str, Site], tmp_path: Path) -> None:
    address, site = far
    go = tmp_path / "go"
    ready = [tmp_path / f"ready-{number}" for number in range(8)]
    children = [
        subprocess.Popen([sys.executable, "-c", PULLS, address, str(one), str(go)], cwd=ROOT)
        for one in ready
    ]
    while not all(one.exists() for one in ready):
        assert all(child.poll() is None for child in children)
        time.sleep(0.01)
    go.touch()
    assert [child.wait(60) for child in children] == [0] * 8
    manifest = blob(Zoo(cache()).resolve(Reference("tiny/stride")))
    for path in files_of(site):
        # The manifest, which says what there is to bring, may be asked for by each.
        assert site.gets[path] <= (9 if path == manifest else 1), path
    find("tiny/stride").verify()
    assert set(files_of(site)) == {f"blobs/sha256/{one}" for one in cache().names("blobs/sha256")}


def test_pull__of_what_is_here_asks_for_the_index_only(far: tuple[str, Site]) -> None:
    address, site = far
    tiny(address)
    before = dict(site.gets)
    tiny(address)
    assert {path: n for path, n in site.gets.items() if n != before[path]} == {"index.json": 2}


# ---- damage, on the way


def test_thousand_flips__are_all_refused_before_a_parser_sees_them(
    far: tuple[str, Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flipped bit in any file, a cut at 64 places of each, a byte more."""
    _, site = far
    place = FolderPlace(site.folder)
    entry = Zoo(place).open(Reference("tiny/stride"))

    def reached(*_: object, **__: object) -> None:
        raise AssertionError("parsed before its digest was checked")

    monkeypatch.setattr("onnx.load_model_from_string", reached)
    monkeypatch.setattr("zoo.catalogue.parse_manifest", reached)
    chance = random.Random(0)
    paths = [*entry.manifest.files, None]
    count = 0
    for number, path in enumerate(paths):
        digest = entry.manifest.digest if path is None else entry.manifest.files[path].sha256
        file = site.folder / blob(digest)
        good = file.read_bytes()
        flips = []
        for _ in range(1000 // len(paths) + 1):
            bit = chance.randrange(8 * len(good))
            changed = bytearray(good)
            changed[bit // 8] ^= 1 << bit % 8
            flips.append(bytes(changed))
        cuts = [good[: number * len(good) // 64] for number in range(64)]
        for bad in [*flips, *cuts, good + b"\0"]:
            file.write_bytes(bad)
            with pytest.raises(DamagedError):
                entry.read(path) if path else Zoo(place).open(Reference("tiny/stride"))
            count += 1
        file.write_bytes(good)
        assert number < len(paths)
    assert count >= 1000 + 64 * len(paths)


# ---- the index


def test_rolled_back_index__is_refused(far: tuple[str, Site], tmp_path: Path) -> None:
    address, site = far
    old = (site.folder / "index.json").read_bytes()
    tiny_entry(tmp_path / "2", licence="MIT")
    WritableZoo(FolderPlace(site.folder)).add(open_entry(tmp_path / "2"))
    tiny(address)
    (site.folder / "index.json").write_bytes(old)
    with pytest.raises(StaleError, match="has the serial 1, and 2 was seen before"):
        tiny(address)
    assert zoo("pull", "tiny/stride", f"zoo={address}") == 2
    assert zoo("pull", "tiny/stride", f"zoo={address}", "accept_rollback=true") == 0


def test_altered_index__of_the_same_serial_is_refused(far: tuple[str, Site]) -> None:
    address, site = far
    tiny(address)
    index = site.folder / "index.json"
    index.write_text(index.read_text().replace('"size": ', '"size": 1'))
    with pytest.raises(StaleError, match="without a new serial"):
        tiny(address)


def test_expired_index__is_refused_until_renewed(far: tuple[str, Site]) -> None:
    address, site = far
    target = WritableZoo(FolderPlace(site.folder))
    target.renew(expires_days=1e-9)
    with pytest.raises(StaleError, match="expired on"):
        tiny(address)
    assert target.renew(expires_days=30).serial == 3
    tiny(address)


# ---- names and addresses


def test_configured_zoos__are_searched_in_order_and_pulled_at_first_use(
    far: tuple[str, Site], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    address, site = far
    tiny_entry(tmp_path / "m", name="tiny/mlp", kind="mlp")
    assert zoo("push", tmp_path / "m", f"to={tmp_path / 'first'}") == 0
    tiny_entry(tmp_path / "o", name="tiny/stride", licence="MIT")
    assert zoo("push", tmp_path / "o", f"to={tmp_path / 'last'}") == 0
    monkeypatch.setenv("MOECAST_ZOO", f"{tmp_path / 'first'}, {address},{tmp_path / 'last'}")
    assert find("tiny/stride").manifest.licence == "Apache-2.0"
    assert f"pulling tiny/stride@{find('tiny/stride').manifest.digest[:12]} from {address}" in (
        capfd.readouterr().err
    )
    assert find("tiny/mlp").manifest.kind == "mlp"
    asked = site.gets["index.json"]
    find("tiny/stride")
    assert site.gets["index.json"] == asked


def test_unknown_name__says_which_command_pulls(far: tuple[str, Site]) -> None:
    with pytest.raises(ZooError, match="python -m zoo pull NAME zoo=ADDRESS"):
        find("tiny/stride")


def test_address__names_zoo_and_entry(far: tuple[str, Site], tmp_path: Path) -> None:
    address, site = far
    digest = Zoo(FolderPlace(site.folder)).resolve(Reference("tiny/stride"))
    for reference in (f"{address}#tiny/stride", address, f"{address}#tiny/stride@{digest}"):
        assert find(reference).manifest.digest == digest
    site.folder = tmp_path  # the zoo is gone: what names one digest is here all the same
    assert find(f"{address}#tiny/stride@{digest}").manifest.digest == digest
    with pytest.raises(ZooError, match="is not a zoo"):
        find(address)


def test_alias__names_a_version(tmp_path: Path) -> None:
    first = tiny_entry(tmp_path / "1")
    tiny_entry(tmp_path / "2", licence="MIT")
    assert zoo("push", tmp_path / "1", "alias=stable") == 0
    assert zoo("push", tmp_path / "2") == 0
    assert find("tiny/stride@stable").manifest == first
    assert find("tiny/stride").manifest.licence == "MIT"
    for bad in ("latest", "deadbeef", "Stable", "-x"):
        assert zoo("push", tmp_path / "1", f"alias={bad}") == 2
    with pytest.raises(ZooError, match=r"Choices: stable, |stable"):
        find("tiny/stride@unstable")


# ---- the same again later


def test_lock__brings_the_same_bytes_a_year_later(
    far: tuple[str, Site], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, site = far
    monkeypatch.setenv("MOECAST_ZOO", address)
    digest = find("tiny/stride").manifest.digest
    assert zoo("lock", f"output={tmp_path / 'zoo.lock'}") == 0
    pins = json.loads((tmp_path / "zoo.lock").read_text())["entries"]
    assert pins == {"tiny/stride": {"digest": digest, "zoo": address}}
    tiny_entry(tmp_path / "2", licence="MIT")
    WritableZoo(FolderPlace(site.folder)).add(open_entry(tmp_path / "2"))
    monkeypatch.delenv("MOECAST_ZOO")
    monkeypatch.setenv("MOECAST_CACHE", str(tmp_path / "another machine"))
    assert zoo("pull", f"locked={tmp_path / 'zoo.lock'}") == 0
    assert find("tiny/stride").manifest.digest == digest


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "python -m zoo lock writes it"), ("{", "is not a lock file"),
     ('{"entries": {"../x": {"digest": "' + "a" * 64 + '", "zoo": "x"}}}', "not the name")],
)  # fmt: skip
def test_lock_file__that_is_none_is_refused(
    content: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "zoo.lock").write_text(content)
    assert zoo("pull", f"locked={tmp_path / 'zoo.lock'}", "zoo=builtin") == 2
    assert message in capsys.readouterr().err


def test_mirror__has_every_version(far: tuple[str, Site], tmp_path: Path) -> None:
    address, site = far
    tiny_entry(tmp_path / "2", licence="MIT")
    tiny_entry(tmp_path / "m", name="tiny/mlp", kind="mlp")
    for folder in ("2", "m"):
        WritableZoo(FolderPlace(site.folder)).add(open_entry(tmp_path / folder))
    assert zoo("pull", "all=true", f"zoo={address}") == 0
    near, there = Zoo(cache()).index(), Zoo(FolderPlace(site.folder)).index()
    assert {name: {*one.versions} for name, one in near.entries.items()} == {
        name: {*one.versions} for name, one in there.entries.items()
    }
    assert all(near.entries[name].latest == one.latest for name, one in there.entries.items())


def test_pull__as_a_folder(far: tuple[str, Site], tmp_path: Path) -> None:
    assert zoo("pull", "tiny/stride", f"zoo={far[0]}", f"output={tmp_path / 'out'}") == 0
    assert open_entry(tmp_path / "out").manifest == find("tiny/stride").manifest
    assert zoo("verify", tmp_path / "out") == 0


@pytest.mark.parametrize("arguments", [[], ["tiny/stride", "all=true"], ["all=true", "output=x"]])
def test_pull__wants_one_thing(arguments: list[str]) -> None:
    assert zoo("pull", "zoo=builtin", *arguments) == 2


# ---- making, cleaning


def test_index__makes_a_zoo_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_entry(tmp_path / "all/a", created="2026-01-01T00:00:00+00:00")
    new = tiny_entry(tmp_path / "all/b", licence="MIT", created="2026-02-01T00:00:00+00:00")
    tiny_entry(tmp_path / "all/deep/c", name="tiny/mlp", kind="mlp")
    assert zoo("index", tmp_path / "all", f"output={tmp_path / 'zoo'}", "expires_days=30") == 0
    assert "python -m http.server --bind 127.0.0.1" in capsys.readouterr().out
    with served(tmp_path / "zoo") as (address, _):
        assert find(f"{address}#tiny/stride").manifest == new
        assert zoo("list", f"zoo={address}", "predictor=mlp", f"run_dir={tmp_path / 'r'}") == 0
    rows = json.loads((tmp_path / "r/results.json").read_text())["entries"]
    assert [one["name"] for one in rows] == ["tiny/mlp"]
    assert zoo("index", tmp_path / "nothing") == 2
    (tmp_path / "empty").mkdir()
    assert zoo("index", tmp_path / "empty") == 2


def test_rm_and_gc__free_what_nothing_names(tmp_path: Path) -> None:
    first = tiny_entry(tmp_path / "1")
    second = tiny_entry(tmp_path / "2", licence="MIT")
    assert zoo("push", tmp_path / "1") == 0
    assert zoo("push", tmp_path / "2") == 0
    assert zoo("rm", f"tiny/stride@{second.digest}") == 0
    assert find("tiny/stride").manifest == first
    (cache().folder / "partial").mkdir()
    (cache().folder / "partial/x").write_bytes(b"x")
    assert zoo("gc") == 0
    named = {first.digest, *(one.sha256 for one in first.files.values())}
    assert set(cache().names("blobs/sha256")) == named
    assert not list((cache().folder / "partial").iterdir())
    assert zoo("rm", "tiny/stride") == 0
    assert zoo("gc") == 0
    assert cache().names("blobs/sha256") == []
    assert zoo("rm", "tiny/stride") == 2


@pytest.mark.parametrize(
    ("filters", "names"),
    [
        (["metric=accuracy"], ["tiny/b", "tiny/a"]),
        (["metric=good_pred"], ["tiny/a", "tiny/b"]),
        (["least=0.85"], ["tiny/b"]),
        (["predictor=stride"], ["tiny/b"]),
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
        assert zoo("push", tmp_path / name, f"to={tmp_path / 'zoo'}") == 0
    capsys.readouterr()
    assert zoo("list", f"zoo={tmp_path / 'zoo'}", "json=true", *filters) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in printed["entries"]] == names


# ---- nothing is unpickled


def test_whole_way__unpickles_nothing(tmp_path: Path) -> None:
    """Publish, pull, load and forecast under an audit hook that sees every pickle."""
    code = f"""
import sys
from pathlib import Path
seen = []
sys.addaudithook(lambda event, args: seen.append(args) if event == "pickle.find_class" else None)
from tests.unit.zoo.test_load import mlp_entry
from tests.unit.zoo.test_pulling import zoo
from tests.builders.entries import tiny_spec
from zoo import load_predictor
folder = Path({str(tmp_path)!r})
mlp_entry(folder / "e")
assert zoo("push", folder / "e", f"to={{folder / 'far'}}") == 0
assert zoo("pull", "tiny/mlp", f"zoo={{folder / 'far'}}") == 0
load_predictor("tiny/mlp", spec=tiny_spec())
assert seen == [], seen
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=120, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


def test_spawned_child__would_be_seen_by_the_hook() -> None:
    """The hook above does see a pickle when there is one."""
    code = """
import sys, pickle, fractions
seen = []
sys.addaudithook(lambda event, args: seen.append(args) if event == "pickle.find_class" else None)
pickle.loads(pickle.dumps(fractions.Fraction(1, 2)))
assert seen
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
    assert multiprocessing.current_process().name == "MainProcess"


def test_load__of_an_address_is_a_predictor(far: tuple[str, Site], tmp_path: Path) -> None:
    from tests.builders.entries import tiny_spec
    from tests.unit.zoo.test_load import mlp_entry

    mlp_entry(tmp_path / "m")
    WritableZoo(FolderPlace(far[1].folder)).add(open_entry(tmp_path / "m"))
    assert load_predictor(f"{far[0]}#tiny/mlp", spec=tiny_spec()).kind == "mlp"
