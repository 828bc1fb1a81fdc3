"""Pulls over the loopback: interrupted, shared by processes, refused when altered."""

import random
import subprocess
import sys
import threading
import time
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from tests.builders.web import Site
from tests.builders.zoos import files_of, publish, pull_tiny, zoo
from zoo.catalog import Zoo
from zoo.errors import DamagedError, UnreachableError
from zoo.index import EntryReference, blob_path
from zoo.load import find_entry, has_blob
from zoo.storage import cache_storage
from zoo.storage.folder import FolderStorage
from zoo.storage.remote import HttpStorage

ROOT = Path(__file__).resolve().parents[3]


# ---- interrupted, endless


def incomplete() -> list[str]:
    """What is in the cache under another name than that of a blob."""
    return [path.name for path in (cache_storage().folder / "blobs/sha256").glob(".*")]


def test_interrupted_pull__leaves_nothing_torn_and_goes_on(far: Site) -> None:
    """What is complete is kept; the file that was cut is begun again."""
    path, size = max(files_of(far).items(), key=lambda one: one[1])
    far.cut[path] = size // 2
    with pytest.raises(UnreachableError):
        pull_tiny(far.address)
    assert Zoo(cache_storage()).read_index().entries == {}
    assert not has_blob(cache_storage(), path.rpartition("/")[2])
    assert incomplete() == []
    pull_tiny(far.address)
    assert far.sent[path] == size // 2 + size
    assert sum(far.gets.values()) == len(files_of(far)) + 3, "the index and this file twice"
    find_entry("tiny/stride").verify()


def test_answer__of_other_bytes_is_not_kept(far: Site) -> None:
    path, _ = max(files_of(far).items(), key=lambda one: one[1])
    (far.folder / path).write_bytes(bytes(8 << 20))
    with pytest.raises(DamagedError, match="is damaged"):
        pull_tiny(far.address)
    assert incomplete() == []
    assert Zoo(cache_storage()).read_index().entries == {}


@pytest.mark.parametrize("drips", [True, False], ids=["drips", "stalls"])
def test_slow_server__ends_with_a_message(drips: bool, far: Site, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("zoo.storage.remote.READ_SECONDS", 0.5)
    ended = threading.Event()

    def answer_slowly(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
        while not ended.wait(0.05):
            if drips:
                handler.wfile.write(b"X: y\r\n")

    monkeypatch.setattr("tests.builders.web.Handler.do_GET", answer_slowly)
    with pytest.raises(UnreachableError, match=r"index\.json .* did not arrive in time"):
        HttpStorage(far.address).read("index.json", limit=1000)
    ended.set()


# ---- several at once


PULLS = """
import sys, time
from pathlib import Path
from zoo.catalog import Zoo
from zoo.index import EntryReference
from zoo.load import pull_reference
from zoo.storage.remote import HttpStorage
Path(sys.argv[2]).touch()
while not Path(sys.argv[3]).exists():
    time.sleep(0.005)
pull_reference(Zoo(HttpStorage(sys.argv[1])), EntryReference("tiny/stride")).verify()
"""


def test_processes__download_each_file_once(far: Site, tmp_path: Path) -> None:
    go = tmp_path / "go"
    ready = [tmp_path / f"ready-{number}" for number in range(4)]
    children = [
        subprocess.Popen([sys.executable, "-c", PULLS, far.address, str(one), str(go)], cwd=ROOT)
        for one in ready
    ]
    while not all(one.exists() for one in ready):
        assert all(child.poll() is None for child in children)
        time.sleep(0.01)
    go.touch()
    assert [child.wait(240) for child in children] == [0] * 4
    assert {path: far.gets[path] for path in files_of(far)} == dict.fromkeys(files_of(far), 1)
    find_entry("tiny/stride").verify()
    assert set(files_of(far)) == {
        f"blobs/sha256/{one}" for one in cache_storage().names("blobs/sha256")
    }


def test_pull__requests_each_file_once_and_then_the_index_only(far: Site) -> None:
    for asked in (1, 2):
        assert zoo("pull", "tiny/stride", f"zoo={far.address}") == 0
        assert far.gets == {"index.json": asked, **dict.fromkeys(files_of(far), 1)}


# ---- damage, on the way


def test_flipped_bits__are_refused_before_parsing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A flipped bit in any file, a cut at 64 places of each, a byte more."""
    manifest, place = publish(tmp_path), Zoo(FolderStorage(tmp_path))
    entry = place.open(EntryReference("tiny/stride"))
    # Parsing fails the test.
    monkeypatch.setattr("onnx.load_model_from_string", None)
    monkeypatch.setattr("zoo.catalog.parse_manifest", None)
    reads = {record.sha256: partial(entry.read, path) for path, record in manifest.files.items()}
    reads[manifest.digest] = partial(place.open, EntryReference("tiny/stride"))
    chance = random.Random(0)
    for digest, read in reads.items():
        file = tmp_path / blob_path(digest)
        good = file.read_bytes()
        bits = [1 << chance.randrange(8 * len(good)) for _ in range(200)]
        flips = [(int.from_bytes(good) ^ bit).to_bytes(len(good)) for bit in bits]
        cuts = [good[: number * len(good) // 64] for number in range(64)]
        for bad in [*flips, *cuts, good + b"\0"]:
            file.write_bytes(bad)
            with pytest.raises(DamagedError):
                read()
        file.write_bytes(good)
