"""One contract for every place: a folder, a web server, object stores, the Hub, a wheel."""

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.builders.entries import tiny_entry
from tests.builders.hub import fake_hub
from tests.builders.stores import s3_bucket
from tests.builders.web import served
from zoo.catalogue import Zoo
from zoo.entry import open_entry
from zoo.errors import DamagedError, UnreachableError
from zoo.index import INDEX, Reference, blob
from zoo.load import find
from zoo.places import FolderPlace, Place, WritablePlace, cache
from zoo.places.http import HttpPlace
from zoo.places.hub import HubPlace
from zoo.places.objects import ObjectPlace
from zoo.places.package import PackagePlace
from zoo.pulling import Cache, pull
from zoo.writing import WritableZoo


@contextmanager
def folder(tmp_path: Path, _: pytest.MonkeyPatch) -> Iterator[Place]:
    yield FolderPlace(tmp_path / "far")


@contextmanager
def web(tmp_path: Path, _: pytest.MonkeyPatch) -> Iterator[Place]:
    with served(tmp_path / "far") as (address, _site):
        yield HttpPlace(address)


@contextmanager
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    (tmp_path / "far").mkdir()
    (tmp_path / "far/__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    yield PackagePlace("far")
    sys.modules.pop("far", None)


@contextmanager
def memory(tmp_path: Path, _: pytest.MonkeyPatch) -> Iterator[Place]:
    place = ObjectPlace(f"memory://{tmp_path.name}")
    yield place
    files, root = place._files
    if files.exists(root):
        files.rm(root, recursive=True)


@contextmanager
def s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    with s3_bucket(tmp_path.name, monkeypatch) as bucket:
        yield ObjectPlace(f"{bucket}/zoo")


@contextmanager
def hub(_: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    with fake_hub() as (address, _repositories):
        yield HubPlace("somebody/zoo", endpoint=address)


KINDS = {"folder": folder, "web": web, "wheel": wheel, "memory": memory, "s3": s3, "hub": hub}


@pytest.fixture(params=KINDS)
def place(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Place]:
    with KINDS[request.param](tmp_path, monkeypatch) as made:
        yield made


def fill(place: Place, tmp_path: Path, **changes: object) -> str:
    """Adds an entry: through the place itself, or into the folder that it shows."""
    at = tmp_path / f"entry-{len(list(tmp_path.glob('entry-*')))}"
    tiny_entry(at, **changes)
    target = place if isinstance(place, WritablePlace) else FolderPlace(tmp_path / "far")
    return WritableZoo(target).add(open_entry(at))


def damage(place: Place, tmp_path: Path, digest: str) -> None:
    """Flips the last bit of a blob where it lies."""
    data = bytearray(place.read(blob(digest), limit=1 << 20))
    data[-1] ^= 1
    if isinstance(place, WritablePlace):
        index = place.read(INDEX, limit=1 << 20)
        place.publish({blob(digest): bytes(data)}, index=(INDEX, index))
    else:
        (tmp_path / "far" / blob(digest)).write_bytes(data)


def pull_tiny(place: Place, name: str = "tiny/stride") -> None:
    zoo = Zoo(place)
    digest, version = zoo.version(Reference(name))
    pull(zoo, name, digest, version, cache=Cache(cache()))


def test_place__gives_what_was_put_in(place: Place, tmp_path: Path) -> None:
    """List, open, read through every file; pull; then it is here without the place."""
    assert Zoo(place).index().entries == {}
    digest = fill(place, tmp_path)
    zoo = Zoo(place)
    assert list(zoo.index(required=True).entries) == ["tiny/stride"]
    entry = zoo.open(Reference("tiny/stride"))
    entry.verify()
    assert entry.manifest.digest == digest
    pull_tiny(place)
    shutil.rmtree(tmp_path / "far", ignore_errors=True)
    found = find("tiny/stride")
    found.verify()
    assert found.manifest == entry.manifest


def test_place__resumes_or_begins_again(place: Place, tmp_path: Path) -> None:
    digest = fill(place, tmp_path)
    whole = place.read(blob(digest), limit=1 << 20)
    with place.stream(blob(digest), offset=10) as stream:
        assert b"".join(stream.chunks) == whole[stream.offset :]
        assert stream.offset in (0, 10)
    assert len(place.read(blob(digest), limit=7)) == 8


def test_place__has_no_such_file(place: Place, tmp_path: Path) -> None:
    fill(place, tmp_path)
    with pytest.raises(FileNotFoundError), place.stream(blob("0" * 64)):
        pass


def test_damaged_blob__is_refused_and_not_kept(place: Place, tmp_path: Path) -> None:
    fill(place, tmp_path)
    manifest = Zoo(place).open(Reference("tiny/stride")).manifest
    damage(place, tmp_path, manifest.files["metrics.json"].sha256)
    with pytest.raises(DamagedError, match=r"metrics\.json of tiny/stride .* is damaged"):
        pull_tiny(place)
    assert Zoo(cache()).index().entries == {}
    assert not list((cache().folder / "partial").iterdir())


def test_second_version__becomes_the_latest_and_can_be_taken_back(
    place: Place, tmp_path: Path
) -> None:
    first = fill(place, tmp_path)
    second = fill(place, tmp_path, licence="MIT")
    assert Zoo(place).resolve(Reference("tiny/stride")) == second
    if not isinstance(place, WritablePlace):
        return
    zoo = WritableZoo(place)
    assert zoo.remove(Reference("tiny/stride", second)) == [second]
    assert zoo.resolve(Reference("tiny/stride")) == first
    manifest = zoo.open(Reference("tiny/stride")).manifest
    removed = zoo.prune()
    assert second in removed
    left = {first, *(one.sha256 for one in manifest.files.values())}
    assert set(place.names("blobs/sha256")) == left
    zoo.open(Reference("tiny/stride")).verify()


def test_hub__shows_the_cards_and_refuses_a_commit_on_an_old_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    with fake_hub() as (address, repositories):
        place = HubPlace("somebody/zoo", endpoint=address)
        fill(place, tmp_path)
        _, files = repositories.head("somebody/zoo")
        assert files["README.md"] == open_entry(tmp_path / "entry-0").read("README.md")
        fill(place, tmp_path, name="tiny/mlp", kind="mlp")
        _, files = repositories.head("somebody/zoo")
        for name in ("tiny/stride", "tiny/mlp"):
            assert f"name: {name}".encode() in files["README.md"]
        assert files["README.md"].count(b"type: accuracy") == 2
        # One commit an addition: index, blobs and card together.
        assert len(repositories.commits["somebody/zoo"]) == 3
        repositories.between.append({"mine.txt": b"x"})
        with pytest.raises(UnreachableError, match=r"after a conflict, ask again"):
            fill(place, tmp_path, name="tiny/token")
        fill(place, tmp_path, name="tiny/token")
        assert "tiny/token" in Zoo(place).index().entries


def test_hub__that_is_off_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    place = HubPlace("somebody/zoo", endpoint="http://127.0.0.1:9")
    with pytest.raises(UnreachableError, match="cannot be read"):
        Zoo(place).index()
    with pytest.raises(UnreachableError, match="check the name, the network and your login"):
        place.has("index.json")


@pytest.mark.parametrize("status", [401, 403, 500, 503])
def test_web__tells_what_the_server_answers(status: int, tmp_path: Path) -> None:
    with served(tmp_path) as (address, site):
        site.status["index.json"] = status
        with pytest.raises(UnreachableError, match=f"the server answers {status}"):
            Zoo(HttpPlace(address)).index()


def test_web__follows_to_where_the_bytes_are(tmp_path: Path) -> None:
    fill(HttpPlace("http://127.0.0.1:1"), tmp_path)
    with served(tmp_path / "far") as (address, site):
        site.redirects["moved/index.json"] = f"{address}/index.json"
        assert list(Zoo(HttpPlace(f"{address}/moved")).index().entries) == ["tiny/stride"]


@pytest.mark.parametrize("where", ["http://127.0.0.1:9/zoo", "s3://bucket/zoo", "hf://a/b"])
def test_offline__asks_nobody(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from zoo.places import place_of

    monkeypatch.setenv("MOECAST_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(UnreachableError, match="MOECAST_OFFLINE is set"):
        Zoo(place_of(where)).index()
