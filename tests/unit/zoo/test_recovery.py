"""Damage in a zoo is kept to what is damaged, and pulling mends it."""

import json
import threading
from pathlib import Path

import pytest

from tests.builders.zoos import Refused, publish, pull_tiny, zoo
from zoo.catalog import WritableZoo, Zoo
from zoo.digest import hash_bytes
from zoo.entry import open_entry
from zoo.errors import DamagedError, ZooError
from zoo.index import EntryReference, blob_path
from zoo.load import find_entry, list_names
from zoo.manifest import EntryManifest, parse_manifest
from zoo.storage import cache_storage
from zoo.storage.folder import FolderStorage


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A zoo with two entries."""
    for kind in ("stride", "mlp"):
        publish(tmp_path / "far", name=f"tiny/{kind}")
    return tmp_path / "far"


def cached_blob(digest: str) -> Path:
    return cache_storage().folder / blob_path(digest)


def test_pull__replaces_a_damaged_cached_blob(source: Path) -> None:
    assert zoo("pull", "tiny/stride", f"zoo={source}") == 0
    manifest = find_entry("tiny/stride").manifest
    for digest in (manifest.digest, *(record.sha256 for record in manifest.files.values())):
        blob = cached_blob(digest)
        data = blob.read_bytes()
        for damage in ("equal size", "other size", "a link"):
            blob.write_bytes(data[:-1] + (b"~" if damage == "equal size" else b""))
            if damage == "a link":
                blob.unlink()
                blob.with_name("elsewhere").write_bytes(data)
                blob.symlink_to(blob.with_name("elsewhere"))
            with pytest.raises(ZooError):
                find_entry("tiny/stride").verify()
            pull_tiny(FolderStorage(source))
            assert blob.read_bytes() == data
            assert not blob.is_symlink()
    assert zoo("verify", "tiny/stride") == 0


def test_damaged_manifest__leaves_other_entries_usable(source, tmp_path, caplog):
    assert zoo("pull", "all=true", f"zoo={source}") == 0
    cached_blob(find_entry("tiny/mlp").manifest.digest).write_bytes(b"{}")
    assert zoo("list", f"run_dir={tmp_path / 'run'}") == 0
    results = json.loads((tmp_path / "run/results.json").read_text())
    assert "tiny/stride" in [entry["name"] for entry in results["entries"]]
    assert results["unreadable"] == ["tiny/mlp"]
    assert "the manifest of tiny/mlp" in caplog.text
    assert zoo("gc") == 0
    find_entry("tiny/stride").verify()
    assert zoo("pull", "tiny/mlp", f"zoo={source}") == 0
    find_entry("tiny/mlp").verify()


@pytest.mark.parametrize("content", [b"\xff\xfe", b'{"serial": 7, "entries": {"tiny'])
def test_damaged_index__hides_no_other_zoo_and_names_the_remedy(content, source, refused):
    assert zoo("pull", "tiny/stride", f"zoo={source}") == 0
    index = cache_storage().folder / "index.json"
    index.write_bytes(content)
    assert "qwen2-moe-tiny/stride" in list_names()
    find_entry("qwen2-moe-tiny/stride").verify()
    assert zoo("list") == 0
    for command in (("gc",), ("pull", "tiny/mlp", f"zoo={source}")):  # gc would remove everything
        assert "remove it, and push or pull the entries again" in refused(*command)
        assert index.read_bytes() == content
    index.unlink()
    assert zoo("pull", "tiny/stride", f"zoo={source}") == 0
    find_entry("tiny/stride").verify()


def test_damaged_copy__of_a_builtin_entry_is_read_from_the_builtin_zoo() -> None:
    assert zoo("pull", "qwen2-moe-tiny/stride", "zoo=builtin") == 0
    digest = find_entry("qwen2-moe-tiny/stride").manifest.digest
    cached_blob(digest).write_bytes(b"{}")
    assert find_entry("qwen2-moe-tiny/stride").manifest.digest == digest


REWRITTEN = {
    "indented by four": lambda data: json.dumps(json.loads(data), indent=4).encode(),
    "space at the end": lambda data: data + b" ",
    "a key twice": lambda data: data.replace(b"{", b'{"kind": "mlp",', 1),
    "escaped": lambda data: data.replace(b"tiny/stride", rb"tiny\u002fstride", 1),
    "other number": lambda data: data.replace(b"0.9,", b"0.90,", 1),
    "infinite": lambda data: data.replace(b"0.9,", b"1e999,", 1),
    "left out default": lambda data: data.replace(b',\n      "graph": null', b"", 1),
}


def test_manifest__of_another_form_is_refused(source: Path, entry: Path) -> None:
    """Its digest is right, but the cache would list it by that of the canonical form."""
    data = (entry / "manifest.json").read_bytes()
    for rewrite in REWRITTEN.values():
        with pytest.raises(ZooError, match="is not in canonical form"):
            parse_manifest(rewrite(data), what="it")
    digest = Zoo(FolderStorage(source)).read_index().entries["tiny/stride"].latest
    changed = REWRITTEN["indented by four"](data)
    (source / blob_path(hash_bytes(changed))).write_bytes(changed)
    index = source / "index.json"
    index.write_text(index.read_text().replace(digest, hash_bytes(changed)))
    assert zoo("pull", "tiny/stride", f"zoo={source}") == 2
    assert Zoo(cache_storage()).read_index().entries == {}
    (entry / "manifest.json").write_bytes(changed)
    (entry / "manifest.sha256").write_text(f"{hash_bytes(changed)}  manifest.json\n")
    assert zoo("verify", entry) == 2


def test_gc__waits_for_a_pull_and_keeps_what_it_downloads(source, monkeypatch):
    """gc begins when all blobs have been downloaded and none is listed yet."""
    publish(cache_storage(), name="tiny/mlp")
    real, collector = WritableZoo.register, threading.Thread(target=zoo, args=("gc",))

    def register(self: WritableZoo, manifest: EntryManifest, **options: object) -> None:
        collector.start()
        collector.join(0.5)
        assert collector.is_alive()
        real(self, manifest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(WritableZoo, "register", register)
    assert zoo("pull", "tiny/stride", f"zoo={source}") == 0
    collector.join(240)
    assert not collector.is_alive()
    find_entry("tiny/stride").verify()


def test_gc__without_an_index_removes_nothing(source: Path, refused: Refused) -> None:
    (source / "index.json").unlink()
    before = sorted(source.rglob("*"))
    for place in (source, source / "mistyped"):
        assert "is not a zoo: it has no index.json" in refused("gc", f"zoo={place}")
    assert sorted(source.rglob("*")) == before


def test_gc__waits_for_a_push(source: Path) -> None:
    storage = FolderStorage(source)
    with storage.exclusive(), storage.open_new("blobs/sha256/x") as file:
        file.write(b"x")
        collector = threading.Thread(target=zoo, args=("gc", f"zoo={source}"))
        collector.start()
        collector.join(0.5)
        assert collector.is_alive()
        assert Path(file.name).exists()
    collector.join(240)
    assert not collector.is_alive()


def test_index__lists_existing_versions_only(source: Path) -> None:
    index = source / "index.json"
    content = json.loads(index.read_text())
    latest = content["entries"]["tiny/mlp"]["latest"]
    entries = content["entries"]
    changes = {"versions": {}}, {"latest": "0" * 64}, {"aliases": {"stable": "0" * 64}}
    for change in (*changes, {"versions": {latest: {"created": "", "size": 10**15}}}):
        bad = {**content, "entries": {**entries, "tiny/mlp": {**entries["tiny/mlp"], **change}}}
        index.write_text(json.dumps(bad))
        with pytest.raises(DamagedError, match=r"entries\.tiny/mlp"):
            Zoo(FolderStorage(source)).open(EntryReference("tiny/mlp"))
        assert zoo("pull", "tiny/mlp", f"zoo={source}") == 2
    for key, value in {"serial": 10**40, "entries": {"\x1b[2Jx": entries["tiny/mlp"]}}.items():
        index.write_text(json.dumps({**content, key: value}))
        with pytest.raises(DamagedError, match=key):
            Zoo(FolderStorage(source)).read_index()


def test_manifest__bounds_the_size_of_an_entry(entry: Path) -> None:
    content = open_entry(entry).manifest.model_dump()
    record = {"sha256": "a" * 64, "size": 2 << 30}
    many = {f"{number}.json": {**record, "size": 1} for number in range(10_001)}
    for files in ({f"{number}.json": record for number in range(3)}, many):
        with pytest.raises(ValueError, match="an entry has 10,000 files of 4,294,967,296 bytes"):
            EntryManifest.model_validate({**content, "files": files})
