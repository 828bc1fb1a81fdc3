"""Pulls over the loopback: resumed, shared by processes, refused when old or altered."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.builders.entries import tiny_entry
from tests.builders.zoos import Far, files_of, pull_tiny, zoo
from zoo.catalog import WritableZoo, Zoo
from zoo.entry import open_entry
from zoo.errors import DamagedError, StaleError, UnreachableError
from zoo.index import EntryReference, blob_path
from zoo.load import find_entry
from zoo.locations import cache_storage
from zoo.pull import PullCache
from zoo.storage import FolderStorage
from zoo.storage.http import HttpStorage
from zoo.storage.hub import HubStorage

ROOT = Path(__file__).resolve().parents[3]


# ---- resuming


@pytest.mark.parametrize("has_ranges", [True, False])
def test_interrupted_download__is_resumed(has_ranges: bool, far: Far) -> None:
    address, site = far
    site.has_ranges = has_ranges
    path, size = max(files_of(site).items(), key=lambda one: one[1])
    site.cut[path] = size // 2
    with pytest.raises(UnreachableError):
        pull_tiny(address)
    assert Zoo(cache_storage()).read_index().entries == {}
    partial = cache_storage().folder / "partial" / path.rpartition("/")[2]
    assert partial.stat().st_size == size // 2
    pull_tiny(address)
    assert site.sent[path] == (size if has_ranges else size // 2 + size)
    find_entry("tiny/stride").verify()
    assert not list(partial.parent.iterdir())


def test_endless_response__does_not_fill_the_disk(far: Far) -> None:
    address, site = far
    path, size = max(files_of(site).items(), key=lambda one: one[1])
    (site.folder / path).write_bytes(os.urandom(size + (8 << 20)))
    with pytest.raises(DamagedError, match="is damaged"):
        pull_tiny(address)
    assert not list((cache_storage().folder / "partial").iterdir())


def test_partial_file__of_other_bytes_is_replaced(far: Far) -> None:
    address, site = far
    path, size = max(files_of(site).items(), key=lambda one: one[1])
    folder = cache_storage().folder / "partial"
    folder.mkdir(parents=True)
    (folder / path.rpartition("/")[2]).write_bytes(os.urandom(size // 3))
    with pytest.raises(DamagedError):
        pull_tiny(address)
    pull_tiny(address)
    find_entry("tiny/stride").verify()


# ---- several at once


PULLS = """
import sys, time
from pathlib import Path
from zoo.catalog import Zoo
from zoo.index import EntryReference
from zoo.load import pull_reference
from zoo.storage.http import HttpStorage
Path(sys.argv[2]).touch()
while not Path(sys.argv[3]).exists():
    time.sleep(0.005)
pull_reference(Zoo(HttpStorage(sys.argv[1])), EntryReference("tiny/stride")).verify()
"""


def test_eight_processes__download_each_file_once(far: Far, tmp_path: Path) -> None:
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
    assert [child.wait(240) for child in children] == [0] * 8
    assert {path: site.gets[path] for path in files_of(site)} == dict.fromkeys(files_of(site), 1)
    find_entry("tiny/stride").verify()
    assert set(files_of(site)) == {
        f"blobs/sha256/{one}" for one in cache_storage().names("blobs/sha256")
    }


def test_pull__requests_each_file_once(far: Far) -> None:
    address, site = far
    assert zoo("pull", "tiny/stride", f"zoo={address}") == 0
    assert site.gets == {"index.json": 1, **dict.fromkeys(files_of(site), 1)}


def test_pull__of_a_damaged_manifest_keeps_nothing(far: Far) -> None:
    address, site = far
    digest = Zoo(FolderStorage(site.folder)).read_index().resolve(EntryReference("tiny/stride"))
    file = site.folder / blob_path(digest)
    whole = file.read_bytes()
    file.write_bytes(whole.replace(b"stride", b"strode"))
    with pytest.raises(DamagedError, match="manifest of tiny/stride"):
        pull_tiny(address)
    assert not PullCache(cache_storage()).has(digest)
    assert cache_storage().names("blobs/sha256") == []
    file.write_bytes(whole)
    pull_tiny(address)
    find_entry("tiny/stride").verify()


def test_pull__replaces_a_damaged_manifest_in_the_cache(far: Far) -> None:
    address, site = far
    pull_tiny(address)
    digest = Zoo(cache_storage()).read_index().resolve(EntryReference("tiny/stride"))
    (cache_storage().folder / blob_path(digest)).write_bytes(b"{}")
    before = site.gets.copy()
    pull_tiny(address)
    assert site.gets - before == {"index.json": 1, blob_path(digest): 1}
    find_entry("tiny/stride").verify()


def test_pull__of_a_cached_entry_requests_the_index_only(far: Far) -> None:
    address, site = far
    pull_tiny(address)
    before = dict(site.gets)
    pull_tiny(address)
    assert {path: n for path, n in site.gets.items() if n != before[path]} == {"index.json": 2}


# ---- damage, on the way


def test_flipped_bits__are_refused_before_parsing(
    far: Far, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flipped bit in any file, a cut at 64 places of each, a byte more."""
    _, site = far
    place = FolderStorage(site.folder)
    entry = Zoo(place).open(EntryReference("tiny/stride"))

    def reached(*_: object, **__: object) -> None:
        raise AssertionError("parsed before its digest was checked")

    monkeypatch.setattr("onnx.load_model_from_string", reached)
    monkeypatch.setattr("zoo.catalog.parse_manifest", reached)
    chance = random.Random(0)
    paths = [*entry.manifest.files, None]
    count = 0
    for number, path in enumerate(paths):
        digest = entry.manifest.digest if path is None else entry.manifest.files[path].sha256
        file = site.folder / blob_path(digest)
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
                entry.read(path) if path else Zoo(place).open(EntryReference("tiny/stride"))
            count += 1
        file.write_bytes(good)
        assert number < len(paths)
    assert count >= 1000 + 64 * len(paths)


# ---- the index


def test_rolled_back_index__is_refused(far: Far, tmp_path: Path) -> None:
    address, site = far
    old = (site.folder / "index.json").read_bytes()
    tiny_entry(tmp_path / "2", licence="MIT")
    WritableZoo(FolderStorage(site.folder)).add(open_entry(tmp_path / "2"))
    pull_tiny(address)
    (site.folder / "index.json").write_bytes(old)
    with pytest.raises(StaleError, match="has serial 1, but 2 was seen before"):
        pull_tiny(address)
    assert zoo("pull", "tiny/stride", f"zoo={address}") == 2
    assert zoo("pull", "tiny/stride", f"zoo={address}", "accept_rollback=true") == 0


def test_altered_index__of_the_same_serial_is_refused(far: Far) -> None:
    address, site = far
    pull_tiny(address)
    index = site.folder / "index.json"
    index.write_text(index.read_text().replace('"size": ', '"size": 1'))
    with pytest.raises(StaleError, match="without a new serial"):
        pull_tiny(address)


def test_expired_index__is_refused_until_renewed(far: Far) -> None:
    address, site = far
    target = WritableZoo(FolderStorage(site.folder))
    target.renew_index(expires_days=1e-9)
    with pytest.raises(StaleError, match="expired on"):
        pull_tiny(address)
    assert target.renew_index(expires_days=30).serial == 3
    pull_tiny(address)


def test_seen_index__has_one_place_for_all_spellings(
    far: Far, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older index is refused by whichever spelling of the address the zoo is named."""
    address, site = far
    port = address.rpartition(":")[2]
    spellings = [f"{address}/", f"{address}//", f"HTTP://127.0.0.1:{port}", f"{address}/./x/.."]
    assert {HttpStorage(spelling).canonical_address for spelling in spellings} == {address}
    assert HttpStorage("https://h:443/z").canonical_address == "https://h/z"
    assert HubStorage("A/b").canonical_address == HubStorage("a/b", "main").canonical_address
    index = site.folder / "index.json"
    index.write_text(index.read_text().replace('"serial": 1', '"serial": 5'))
    (tmp_path / "link").symlink_to(site.folder)
    monkeypatch.chdir(tmp_path)
    assert zoo("pull", "tiny/stride", f"zoo={site.folder}") == 0
    index.write_text(index.read_text().replace('"serial": 5', '"serial": 4'))
    for spelling in ("far", "./far", "link", "far/../far", f"file://{site.folder}"):
        assert zoo("pull", "tiny/stride", f"zoo={spelling}") == 2, spelling


def test_forged_serial__does_not_freeze_a_zoo(far: Far, capsys: pytest.CaptureFixture[str]) -> None:
    address, site = far
    pull_tiny(address)
    index = site.folder / "index.json"
    good = index.read_text()
    for serial in (10**40, 2**31, 2**31 - 1, 1_000_002):
        index.write_text(good.replace('"serial": 1', f'"serial": {serial}'))
        assert zoo("pull", "tiny/stride", f"zoo={address}") == 2
    assert "accept_rollback=true" in capsys.readouterr().err
    index.write_text(good)
    pull_tiny(address)
