"""Pulls over the loopback: interrupted, shared by processes, refused when altered."""

import os
import random
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from tests.builders.zoos import Far, files_of, pull_tiny, zoo
from zoo.catalog import Zoo
from zoo.errors import DamagedError, UnreachableError
from zoo.index import EntryReference, blob_path
from zoo.load import find_entry
from zoo.pull import has_blob
from zoo.storage import cache_storage
from zoo.storage.folder import FolderStorage
from zoo.storage.remote import HttpStorage

ROOT = Path(__file__).resolve().parents[3]


# ---- interrupted, endless


def incomplete() -> list[str]:
    """What is in the cache under another name than that of a blob."""
    return [path.name for path in (cache_storage().folder / "blobs/sha256").glob(".*")]


def test_interrupted_pull__leaves_nothing_torn_and_goes_on(far: Far) -> None:
    """What is complete is kept; the file that was cut is begun again."""
    address, site = far
    path, size = max(files_of(site).items(), key=lambda one: one[1])
    site.cut[path] = size // 2
    with pytest.raises(UnreachableError):
        pull_tiny(address)
    assert Zoo(cache_storage()).read_index().entries == {}
    assert not has_blob(cache_storage(), path.rpartition("/")[2])
    assert incomplete() == []
    pull_tiny(address)
    assert site.sent[path] == size // 2 + size
    assert sum(site.gets.values()) == len(files_of(site)) + 3, "the index and this file twice"
    find_entry("tiny/stride").verify()


@pytest.mark.parametrize("is_longer", [True, False], ids=["endless", "other bytes"])
def test_answer__of_other_bytes_is_not_kept(is_longer: bool, far: Far) -> None:
    address, site = far
    path, size = max(files_of(site).items(), key=lambda one: one[1])
    (site.folder / path).write_bytes(os.urandom(size + (8 << 20) * is_longer))
    with pytest.raises(DamagedError, match="is damaged"):
        pull_tiny(address)
    assert incomplete() == []
    assert Zoo(cache_storage()).read_index().entries == {}


@pytest.mark.parametrize("drips", [True, False], ids=["drips", "stalls"])
def test_slow_server__ends_with_a_message(
    drips: bool, far: Far, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, _ = far
    monkeypatch.setattr("zoo.storage.remote.READ_SECONDS", 0.5)
    ended = threading.Event()

    def answer_slowly(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
        while not ended.wait(0.05):
            if drips:
                handler.wfile.write(b"X: y\r\n")

    monkeypatch.setattr("tests.builders.web.Handler.do_GET", answer_slowly)
    with pytest.raises(UnreachableError, match=r"index\.json .* did not arrive in time"):
        HttpStorage(address).read("index.json", limit=1000)
    ended.set()


# ---- several at once


PULLS = """
import sys, time
from pathlib import Path
from zoo.catalog import Zoo
from zoo.index import EntryReference
from zoo.pull import pull_reference
from zoo.storage.remote import HttpStorage
Path(sys.argv[2]).touch()
while not Path(sys.argv[3]).exists():
    time.sleep(0.005)
pull_reference(Zoo(HttpStorage(sys.argv[1])), EntryReference("tiny/stride")).verify()
"""


def test_processes__download_each_file_once(far: Far, tmp_path: Path) -> None:
    address, site = far
    go = tmp_path / "go"
    ready = [tmp_path / f"ready-{number}" for number in range(4)]
    children = [
        subprocess.Popen([sys.executable, "-c", PULLS, address, str(one), str(go)], cwd=ROOT)
        for one in ready
    ]
    while not all(one.exists() for one in ready):
        assert all(child.poll() is None for child in children)
        time.sleep(0.01)
    go.touch()
    assert [child.wait(240) for child in children] == [0] * 4
    assert {path: site.gets[path] for path in files_of(site)} == dict.fromkeys(files_of(site), 1)
    find_entry("tiny/stride").verify()
    assert set(files_of(site)) == {
        f"blobs/sha256/{one}" for one in cache_storage().names("blobs/sha256")
    }


def test_pull__requests_each_file_once(far: Far) -> None:
    address, site = far
    assert zoo("pull", "tiny/stride", f"zoo={address}") == 0
    assert site.gets == {"index.json": 1, **dict.fromkeys(files_of(site), 1)}


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
