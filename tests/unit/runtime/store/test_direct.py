"""Direct reads give the bytes of the range and touch nothing else."""

import errno
import logging
import mmap
import os
import random

import pytest

from runtime.config import PageCache
from runtime.errors import TransferError
from runtime.store import files
from runtime.store.files import BLOCK, SMALLEST, EndOfFile, FileReader, read_direct
from runtime.tools.bench.tasks import cached_bytes
from tests.builders.page_cache import uncached_zeros

SIZE = 600_003


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "bytes"
    path.write_bytes(random.Random(0).randbytes(SIZE))
    return path


@pytest.fixture
def descriptor(file):
    """Opened for direct reads; skips where the file system has none."""
    try:
        handle = os.open(file, os.O_RDONLY | files.O_DIRECT)
    except OSError as error:
        pytest.skip(f"no direct reads here: {error}")
    yield handle
    os.close(handle)


def test_read_direct__any_range_into_any_memory(file, descriptor):
    content, rng = file.read_bytes(), random.Random(1)
    memory = memoryview(mmap.mmap(-1, 1 << 20))
    for _ in range(150):
        sizes = rng.randrange(2 * BLOCK), rng.randrange(430_000), BLOCK * rng.randrange(20)
        size = SMALLEST + rng.choice(sizes)
        last = SIZE - size
        offset = rng.choice([rng.randrange(last), rng.randrange(last) // BLOCK * BLOCK, last])
        place = rng.choice([rng.randrange(2 * BLOCK), BLOCK, 64 * rng.randrange(64)])
        memory[:] = b"\xee" * len(memory)
        read_direct(descriptor, offset, memory[place : place + size])
        before, after = b"\xee" * place, b"\xee" * (len(memory) - place - size)
        assert memory == before + content[offset : offset + size] + after


@pytest.mark.parametrize("offset", [SIZE - SMALLEST + 1, SIZE - 5, SIZE + 10_000, BLOCK * 140])
def test_read_direct__beyond_the_end_is_an_error(descriptor, offset):
    # Which of the two depends on whether the file ends inside a block; see FileReader.
    with pytest.raises((EndOfFile, OSError)):
        read_direct(descriptor, offset, memoryview(mmap.mmap(-1, SMALLEST)))


def test_read_direct__short_reads_are_read_on(file, descriptor, monkeypatch):
    real = os.preadv
    # As some file systems do: never more than three blocks at once.
    monkeypatch.setattr(os, "preadv", lambda fd, parts, at: real(fd, [parts[0][: 3 * BLOCK]], at))
    memory = memoryview(mmap.mmap(-1, 1 << 20))[64 : 64 + 300_000]
    read_direct(descriptor, 1_000, memory)
    assert memory == file.read_bytes()[1_000:301_000]


@pytest.mark.parametrize("page_cache", PageCache)
@pytest.mark.parametrize("size", [1_000, 200_000])
def test_reader__every_way_of_reading_gives_the_bytes(file, page_cache, size):
    reader, target = FileReader(page_cache=page_cache), bytearray(size)
    reader.read(file, 12_345, memoryview(target), what="it")
    assert target == file.read_bytes()[12_345 : 12_345 + size]
    with pytest.raises(TransferError, match=rf"bytes: ends at byte {SIZE}, where it needs"):
        reader.read(file, SIZE - size + 1, memoryview(target), what="it")
    reader.close()


@pytest.mark.parametrize("refuses", ["open", "read"])
def test_reader__uses_the_cache_and_logs_without_direct_reads(file, monkeypatch, caplog, refuses):
    real = os.open

    def invalid(*_):
        raise OSError(errno.EINVAL, "Invalid argument")

    def no_direct(path, flags, *args):
        return (invalid if flags & files.O_DIRECT else real)(path, flags, *args)

    if refuses == "open":
        monkeypatch.setattr(os, "open", no_direct)
    else:
        monkeypatch.setattr(files, "read_direct", invalid)
    reader, target = FileReader(), bytearray(200_000)
    with caplog.at_level(logging.INFO):
        reader.read(file, 5, memoryview(target), what="it")
        reader.read(file, 6, memoryview(target), what="it")
    assert target == file.read_bytes()[6:200_006]
    assert [record.message for record in caplog.records] == [
        f"{file}: no direct reads on this file system; reads go through the page cache "
        "and are dropped behind"
    ]
    reader.close()


@pytest.mark.parametrize("page_cache", PageCache)
def test_reader__uses_the_page_cache_as_configured(tmp_path, page_cache):
    # Eight reads of 1 MiB, not aligned, of a file that is on the disk and not in memory.
    path = uncached_zeros(tmp_path / "large", 16 << 20)
    reader, target = FileReader(page_cache=page_cache), memoryview(bytearray(1 << 20))
    for i in range(8):
        reader.read(path, i * (2 << 20) + 100, target, what="it")
    kept = cached_bytes([path])
    assert kept >= 8 << 20 if page_cache is PageCache.KEEP else kept == 0
    reader.close()


def other_bytes(seed):
    return random.Random(seed).randbytes(SIZE)


def read_some(reader, file):
    target = bytearray(SMALLEST)
    reader.read(file, 300_000, memoryview(target), what="it")
    return target


def test_reader__a_file_moved_over_a_remembered_one_is_not_read(file, tmp_path):
    content = file.read_bytes()[300_000:][:SMALLEST]
    reader = FileReader()
    reader.remember([file])
    (tmp_path / "other").write_bytes(other_bytes(1))
    (tmp_path / "other").replace(file)
    assert read_some(reader, file) == content
    [opened] = reader.pin([file])
    reader.unpin([opened], failed=True)
    with pytest.raises(TransferError, match="bytes: another file than when the model was loaded"):
        read_some(reader, file)
    reader.close()


def test_reader__a_remembered_file_that_was_written_to_is_refused_until_it_is_as_it_was(
    file, monkeypatch
):
    monkeypatch.setattr(files, "SECONDS_BETWEEN_LOOKS", 0.0)
    content = file.read_bytes()
    reader = FileReader()
    reader.remember([file])
    for broken in (other_bytes(1), content[:-1], b""):
        file.write_bytes(broken)
        said = "load the model again" if len(broken) == SIZE else "truncated: fetch it again"
        with pytest.raises(TransferError, match=said):
            read_some(reader, file)
        file.unlink()
        with pytest.raises(TransferError, match="failed 3 times"):
            read_some(reader, file)
        file.write_bytes(content)  # fetched again: another inode, a later time
        assert read_some(reader, file) == content[300_000:][:SMALLEST]
    reader.close()
