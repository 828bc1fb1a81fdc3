"""Hostile names, cards, addresses and caches: refused with a cause, or shown harmlessly."""

import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from predictors.errors import DiskFullError
from tests.builders.entries import forge_card, tiny_entry, tiny_spec
from tests.builders.zoos import pull_tiny, zoo
from zoo.card import StoredCard, check_card, write_front_page
from zoo.entry import open_entry
from zoo.errors import ZooError
from zoo.load import find_entry
from zoo.storage import cache_storage, open_storage

ESCAPES = "\x1b]0;owned\x07 \x1b[2J \x9b31m \u202e [/red] [link=x]"


@pytest.fixture
def evil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Two packages on the search path that must not be imported."""
    (tmp_path / "evil/inner").mkdir(parents=True)
    for name in ("evil/__init__.py", "evil/inner/__init__.py"):
        (tmp_path / name).write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    assert not {"evil", "evil.inner"} & set(sys.modules)


def test_terminal__gets_no_escape_from_an_entry(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    tiny_entry(
        tmp_path / "e", kind=ESCAPES, licence=ESCAPES, spec=tiny_spec(model_id=ESCAPES),
        created=ESCAPES[:60], metrics={"held_out": {"accuracy": ESCAPES, "good_pred": 10**400}},
        card_extra=ESCAPES,
    )  # fmt: skip
    for command in ("show", "verify", "push", "list"):
        zoo(command, *([] if command == "list" else [tmp_path / "e"]))
    printed = "".join(capsys.readouterr())
    assert "x1b" in printed
    assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(printed)


@pytest.mark.parametrize(
    "card",
    [b"\xff\xfe", b"---\n- a\n---\nx", b"---\n1: 2\n---\nx", b"---\nmodel-index: 3\n---\nx",
     b"---\n" + b"[" * 600 + b"\n---\nx", b"x" * (1 << 20) + b"x"],
)  # fmt: skip
def test_card__of_another_form_is_an_error_of_the_zoo(card: bytes, entry: Path) -> None:
    with pytest.raises(ZooError, match=r"README\.md"):
        check_card(card, open_entry(entry).manifest)
    assert b"tiny/a" in write_front_page({"tiny/a": StoredCard(card), "tiny/b": StoredCard()})
    forge_card(entry, card)
    assert zoo("show", entry) == 0
    assert zoo("push", entry) == 2


@pytest.mark.parametrize(
    "address",
    ["package://os", "package://evil", "package://evil.inner", "jlab://x", "nope://",
     "~nosuchuser", "\0", "github://", "https://h:99999", "http://[::1", "s3://",
     "." * 5000, "a\ud800"],
)  # fmt: skip
def test_address__that_is_no_zoo_is_named_and_runs_nothing(address, evil, monkeypatch):
    monkeypatch.setenv("MOECAST_OFFLINE", "1")
    with pytest.raises((ZooError, FileNotFoundError)):
        open_storage(address).read("index.json", limit=9)
    with pytest.raises((ZooError, FileNotFoundError)):
        find_entry(address)
    assert zoo("list", f"zoo={address}") == 2


def test_pull__checks_free_space_first(far, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zoo.storage.folder.FolderStorage.free_bytes", lambda _: 10)
    with pytest.raises(DiskFullError, match="10 are free"):
        pull_tiny(far.address)
    assert len(far.gets) == 2, "the index and the manifest"


def test_pull__to_a_disk_that_fills_up_is_one_line_and_goes_on(far, monkeypatch):
    blobs, fsync = cache_storage().folder / "blobs/sha256", os.fsync

    def fail(handle: int) -> None:
        if any(os.path.samestat(file.stat(), os.fstat(handle)) for file in blobs.glob(".*.tmp")):
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(handle)

    with monkeypatch.context() as full:
        full.setattr(os, "fsync", fail)
        with pytest.raises(DiskFullError, match="is full"):
            pull_tiny(far.address)
    assert list(blobs.glob(".*")) == []
    pull_tiny(far.address)
    find_entry("tiny/stride").verify()


def test_files_of_another_kind__are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder, file, fifo = tmp_path / "folder", tmp_path / "file", tmp_path / "fifo"
    folder.mkdir()
    file.write_text("x")
    os.mkfifo(fifo)
    for path in (folder, fifo, file / "below"):
        assert zoo("pull", f"locked={path}", "zoo=builtin") == 2
    for path in (file, fifo, file / "below", folder):
        assert zoo("show", path) == 2
        assert zoo("push", path) == 2
        assert zoo("list", f"zoo={path}") == 2
    (folder / "index.json").mkdir()
    assert zoo("list", f"zoo={folder}") == 2
    assert "Error:" not in capsys.readouterr().err
