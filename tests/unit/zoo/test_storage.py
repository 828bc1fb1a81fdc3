"""One contract for every storage: a folder, a web server, object stores, the Hub."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.builders.stores import s3_bucket
from tests.builders.web import served
from tests.builders.zoos import publish, pull_tiny
from zoo.catalog import WritableZoo, Zoo
from zoo.digest import hash_bytes
from zoo.errors import DamagedError, UnreachableError
from zoo.index import INDEX, EntryReference, blob_path
from zoo.load import find_entry
from zoo.storage import cache_storage
from zoo.storage.base import FileStorage, Storage, WritableStorage
from zoo.storage.folder import FolderStorage
from zoo.storage.hub import HubStorage
from zoo.storage.remote import HttpStorage, ObjectStorage


@pytest.fixture
def folder(tmp_path: Path) -> Storage:
    return FolderStorage(tmp_path / "far")


@pytest.fixture
def web(tmp_path: Path) -> Iterator[Storage]:
    with served(tmp_path / "far") as (address, _site):
        yield HttpStorage(address)


@pytest.fixture
def memory(tmp_path: Path) -> Storage:
    return ObjectStorage(f"memory://{tmp_path.name}")


@pytest.fixture
def s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Storage]:
    with s3_bucket(tmp_path.name, monkeypatch) as bucket:
        yield ObjectStorage(f"{bucket}/zoo")


@pytest.fixture(params=["folder", "web", "memory", "s3", "hub"])
def storage(request: pytest.FixtureRequest) -> Storage:
    made = request.getfixturevalue(request.param)
    return made[0] if request.param == "hub" else made


@pytest.fixture(params=["folder", "memory", "s3"])
def file_storage(request: pytest.FixtureRequest) -> FileStorage:
    return request.getfixturevalue(request.param)


def fill(storage: Storage, tmp_path: Path, **changes: object) -> str:
    """Adds an entry: through the storage itself, or into the folder that it shows."""
    place = storage if isinstance(storage, WritableStorage) else tmp_path / "far"
    return publish(place, **changes).digest


def damage(storage: Storage, tmp_path: Path, digest: str) -> None:
    """Flips the last bit of a blob where it lies."""
    data = bytearray(storage.read(blob_path(digest), limit=1 << 20))
    data[-1] ^= 1
    if isinstance(storage, WritableStorage):
        index = storage.read(INDEX, limit=1 << 20)
        with storage.exclusive() as seen:
            files = {blob_path(digest): bytes(data)}
            storage.publish(files, (INDEX, index), [], seen)
    else:
        (tmp_path / "far" / blob_path(digest)).write_bytes(data)


def test_storage__gives_what_was_put_in(storage: Storage, tmp_path: Path) -> None:
    """List, open, read through every file; pull; then it is here without the storage."""
    assert Zoo(storage).read_index().entries == {}
    digest = fill(storage, tmp_path)
    zoo = Zoo(storage)
    assert list(zoo.read_index(required=True).entries) == ["tiny/stride"]
    entry = zoo.open(EntryReference("tiny/stride"))
    entry.verify()
    assert entry.manifest.digest == digest
    assert len(storage.read(blob_path(digest), limit=7)) == 8
    pull_tiny(storage)
    shutil.rmtree(tmp_path / "far", ignore_errors=True)
    found = find_entry("tiny/stride")
    found.verify()
    assert found.manifest == entry.manifest


def test_file__is_whole_or_not_there(file_storage: FileStorage) -> None:
    assert file_storage.names() == []
    assert file_storage.size("a") is None
    with pytest.raises(FileNotFoundError):
        file_storage.read("a")
    file_storage.write("a", b"one")
    file_storage.write("a", b"three")
    assert file_storage.read("a") == b"three"
    assert file_storage.size("a") == 5
    assert file_storage.create("b", b"first")
    assert not file_storage.create("b", b"second"), "of two that begin, one does"
    assert file_storage.read("b") == b"first"

    def fail() -> None:
        with file_storage.open_new("c") as file:
            file.write(b"part")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert file_storage.names() == ["a", "b"]
    with file_storage.open_new("c") as file:
        file.write(b"whole")
    assert file_storage.read("c") == b"whole"
    assert file_storage.sha256("c") == hash_bytes(b"whole")
    file_storage.remove("a")
    file_storage.remove("a")
    assert file_storage.names() == ["b", "c"]


@pytest.mark.parametrize("name", ["metrics.json", "the manifest"])
def test_damaged_blob__is_refused_before_parsing_and_not_kept(name, storage, tmp_path, monkeypatch):
    fill(storage, tmp_path)
    manifest = Zoo(storage).open(EntryReference("tiny/stride")).manifest
    digest = manifest.files[name].sha256 if name in manifest.files else manifest.digest
    damage(storage, tmp_path, digest)
    if digest == manifest.digest:
        monkeypatch.setattr("zoo.catalog.parse_manifest", None)
    with pytest.raises(DamagedError, match=rf"{name} of tiny/stride.* is damaged"):
        pull_tiny(storage)
    assert Zoo(cache_storage()).read_index().entries == {}
    assert not (cache_storage().folder / blob_path(digest)).exists()
    assert not list((cache_storage().folder / "blobs/sha256").glob(".*"))


def test_second_version__becomes_the_latest_and_can_be_removed(storage: Storage, tmp_path: Path):
    first = fill(storage, tmp_path)
    second = fill(storage, tmp_path, licence="MIT")
    assert Zoo(storage).read_index().resolve(EntryReference("tiny/stride")) == second
    if not isinstance(storage, WritableStorage):
        return
    zoo = WritableZoo(storage)
    assert zoo.remove(EntryReference("tiny/stride", second)) == [second]
    assert zoo.read_index().resolve(EntryReference("tiny/stride")) == first
    manifest = zoo.open(EntryReference("tiny/stride")).manifest
    assert second in zoo.prune()
    left = {first, *(one.sha256 for one in manifest.files.values())}
    assert set(storage.names("blobs/sha256")) == left
    zoo.open(EntryReference("tiny/stride")).verify()


def test_hub__shows_cards_and_refuses_a_stale_commit(hub, tmp_path):
    storage, repositories = hub
    fill(storage, tmp_path)
    _, files = repositories.head("publisher/zoo")
    assert files["README.md"] == Zoo(storage).open(EntryReference("tiny/stride")).read("README.md")
    fill(storage, tmp_path, name="tiny/mlp", kind="mlp")
    _, files = repositories.head("publisher/zoo")
    for name in ("tiny/stride", "tiny/mlp"):
        assert f"name: {name}".encode() in files["README.md"]
    assert files["README.md"].count(b"type: accuracy") == 2
    # One commit an addition: index, blobs and card together.
    assert len(repositories.commits["publisher/zoo"]) == 3
    repositories.between.append({"mine.txt": b"x"})
    with pytest.raises(UnreachableError, match=r"after a conflict, try again"):
        fill(storage, tmp_path, name="tiny/token")
    fill(storage, tmp_path, name="tiny/token")
    assert "tiny/token" in Zoo(storage).read_index().entries


def test_unreachable_hub__is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    storage = HubStorage("publisher/zoo", endpoint="http://127.0.0.1:9")
    with pytest.raises(UnreachableError, match="cannot be reached"):
        Zoo(storage).read_index()
    with pytest.raises(UnreachableError, match="check the name, the network and your login"):
        storage.has("index.json")


@pytest.mark.parametrize("status", [401, 403, 500, 503])
def test_web__reports_the_servers_status(status: int, tmp_path: Path) -> None:
    with served(tmp_path) as (address, site):
        site.status["index.json"] = status
        with pytest.raises(UnreachableError, match=f"the server answers {status}"):
            Zoo(HttpStorage(address)).read_index()


def test_web__follows_redirects(tmp_path: Path) -> None:
    fill(HttpStorage("http://127.0.0.1:1"), tmp_path)
    with served(tmp_path / "far") as (address, site):
        site.redirects["moved/index.json"] = f"{address}/index.json"
        assert list(Zoo(HttpStorage(f"{address}/moved")).read_index().entries) == ["tiny/stride"]


@pytest.mark.parametrize("where", ["http://127.0.0.1:9/zoo", "s3://bucket/zoo", "hf://a/b"])
def test_offline__makes_no_request(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOECAST_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(UnreachableError, match="MOECAST_OFFLINE is set"):
        Zoo.at(where).read_index()
