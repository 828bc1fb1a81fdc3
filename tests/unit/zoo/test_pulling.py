"""Pulls over the loopback: interrupted, shared by processes, refused when altered."""

import threading
from http.server import BaseHTTPRequestHandler

import pytest

from tests.builders.processes import run_python
from tests.builders.zoos import files_of, pull_tiny, zoo
from zoo.catalog import Zoo
from zoo.errors import DamagedError, UnreachableError
from zoo.index import blob_path
from zoo.load import find_entry
from zoo.storage import cache_storage
from zoo.storage.remote import HttpStorage

# ---- interrupted, endless


def incomplete() -> list[str]:
    """What is in the cache under another name than that of a blob."""
    return [path.name for path in (cache_storage().folder / "blobs/sha256").glob(".*")]


def test_interrupted_pull__leaves_nothing_torn_and_goes_on(far) -> None:
    """What is complete is kept; the file that was cut is begun again."""
    path, size = max(files_of(far).items(), key=lambda one: one[1])
    far.cut[path] = size // 2
    with pytest.raises(UnreachableError):
        pull_tiny(far.address)
    assert Zoo(cache_storage()).read_index().entries == {}
    digest = path.rpartition("/")[2]
    assert not cache_storage().has_bytes(blob_path(digest), digest)
    assert incomplete() == []
    pull_tiny(far.address)
    assert far.sent[path] == size // 2 + size
    assert sum(far.gets.values()) == len(files_of(far)) + 3, "the index and this file twice"
    find_entry("tiny/stride").verify()


def test_answer__of_other_bytes_is_not_kept(far) -> None:
    path, _ = max(files_of(far).items(), key=lambda one: one[1])
    (far.folder / path).write_bytes(bytes(8 << 20))
    with pytest.raises(DamagedError, match="is damaged"):
        pull_tiny(far.address)
    assert incomplete() == []
    assert Zoo(cache_storage()).read_index().entries == {}


@pytest.mark.parametrize("drips", [True, False], ids=["drips", "stalls"])
def test_slow_server__ends_with_a_message(drips: bool, far, monkeypatch: pytest.MonkeyPatch):
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
import os, sys
from tests.builders.zoos import pull_tiny
reads, writes = os.pipe()
children = []
for _ in range(4):
    if not (child := os.fork()):
        os.close(writes)
        os.read(reads, 1)  # until all are there
        pull_tiny(sys.argv[1])
        os._exit(0)
    children.append(child)
os.close(writes)
assert not any(os.waitpid(child, 0)[1] for child in children)
"""
"""Children of one process: importing takes longer than pulling."""


def test_processes__download_each_file_once(far) -> None:
    run_python("-c", PULLS, far.address)
    assert {path: far.gets[path] for path in files_of(far)} == dict.fromkeys(files_of(far), 1)
    find_entry("tiny/stride").verify()
    blobs = cache_storage().names("blobs/sha256")
    assert set(files_of(far)) == {f"blobs/sha256/{name}" for name in blobs}


def test_pull__requests_each_file_once_and_then_the_index_only(far) -> None:
    for asked in (1, 2):
        assert zoo("pull", "tiny/stride", f"zoo={far.address}") == 0
        assert far.gets == {"index.json": asked, **dict.fromkeys(files_of(far), 1)}
