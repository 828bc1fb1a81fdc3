"""Names, versions, pulling and pushing, through the command face as users do it."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.builders.entries import forge_card, tiny_entry
from tests.builders.zoos import Refused, fail_each_fsync, publish, zoo
from zoo.catalog import WritableZoo, Zoo
from zoo.commands.publish import check_publishable
from zoo.entry import open_entry
from zoo.errors import DamagedError, RefusedError, ZooError
from zoo.index import EntryReference
from zoo.storage import BUILTIN, cache_storage
from zoo.storage.folder import FolderStorage


def test_push__publishes_no_entry_of_a_folder_if_one_is_damaged(tmp_path: Path) -> None:
    for kind in ("stride", "mlp"):
        tiny_entry(tmp_path / "entries" / kind, name=f"tiny/{kind}")
    next((tmp_path / "entries/stride").rglob("*.onnx")).write_bytes(b"altered")
    assert zoo("push", tmp_path / "entries", f"zoo={tmp_path / 'other'}") == 2
    assert not (tmp_path / "other").exists()


def test_same_entry_twice__changes_nothing(tmp_path: Path) -> None:
    publish(tmp_path)
    before = (tmp_path / "index.json").read_bytes()
    publish(tmp_path)
    assert (tmp_path / "index.json").read_bytes() == before


def test_writers_at_once__lose_no_listing(tmp_path: Path) -> None:
    names = [f"tiny/p{number}" for number in range(8)]
    for number, name in enumerate(names):
        tiny_entry(tmp_path / str(number), name=name)
    target = WritableZoo(FolderStorage(tmp_path / "zoo"))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: target.add(open_entry(tmp_path / str(n))), range(8)))
    assert sorted(target.read_index().entries) == names
    assert target.read_index().serial == 8


def test_failed_write__lists_all_entries_or_none(entry, tmp_path, monkeypatch):
    """The Nth fsync fails, for every N there is; the next try succeeds."""
    tiny_entry(tmp_path / "mlp", name="tiny/mlp")
    published = [open_entry(entry), open_entry(tmp_path / "mlp")]
    names = {one.manifest.name for one in published}
    blobs = {file.sha256 for one in published for file in one.manifest.files.values()}
    for number, failing in enumerate(fail_each_fsync(monkeypatch)):
        target = WritableZoo(FolderStorage(tmp_path / str(number)))
        with failing:
            target.add(*published)
        listed = set(target.read_index().entries)
        assert listed in (set(), names)
        for name in listed:
            target.open(EntryReference(name)).verify()
        target.add(*published)
        for name in names:
            target.open(EntryReference(name)).verify()
        assert len(target.storage.names("blobs/sha256")) == len(blobs) + 2


MISSING_FIELDS = [
    ({"licence": " "}, "a licence"),
    ({"metrics": {}}, "metrics on held-out requests"),
    ({"metrics": {"held_out": {"accuracy": None}}}, "metrics on held-out requests"),
    ({"trace_digest": None}, "the digest of its training trace"),
]


@pytest.mark.parametrize(("changes", "lacks"), MISSING_FIELDS)
def test_push__lists_missing_fields(changes, lacks, tmp_path, refused):
    tiny_entry(tmp_path / "e", **changes)
    assert f"it lacks {lacks}" in refused("push", tmp_path / "e", f"zoo={tmp_path / 'zoo'}")
    assert not (tmp_path / "zoo").exists()


POOR_CARDS = [
    (None, "a valid model card"),
    (b"no front matter", "licence None"),
    (b"---\nlicense: mit\n---\ntext", "licence 'mit'"),
    (b"---\nlicense: apache-2.0\n---\n", "is empty"),
    (b"---\n[: bad\n---\ntext", "is not a model card"),
]


@pytest.mark.parametrize(("card", "lacks"), POOR_CARDS)
def test_push__refuses_a_poor_card(card: bytes | None, lacks: str, entry: Path) -> None:
    forge_card(entry, card)
    with pytest.raises(RefusedError, match=lacks):
        check_publishable(open_entry(entry))


def test_change__that_would_make_the_index_unreadable_is_refused(tmp_path: Path) -> None:
    publish(tmp_path)
    before = (tmp_path / "index.json").read_bytes()
    target, reference = WritableZoo(FolderStorage(tmp_path)), EntryReference("tiny/stride")
    with pytest.raises(ZooError, match="its index would be wrong: entries.*String should match"):
        target.move_alias(reference, "x" * 80, check=lambda *_: None)
    assert (tmp_path / "index.json").read_bytes() == before


def test_push__refuses_untracked_files(entry: Path, tmp_path: Path, refused: Refused) -> None:
    (entry / "extra.json").write_text("{}")
    assert "extra.json" in refused("push", entry, f"zoo={tmp_path / 'zoo'}")
    assert "extra.json" in refused("verify", entry)


def test_index__that_names_another_entry_is_refused(tmp_path: Path) -> None:
    publish(tmp_path)
    index = tmp_path / "index.json"
    index.write_text(index.read_text().replace("tiny/stride", "tiny/mlp"))
    with pytest.raises(DamagedError, match="is that of 'tiny/stride'"):
        Zoo(FolderStorage(tmp_path)).open(EntryReference("tiny/mlp"))


@pytest.mark.parametrize("content", ["", "{", '{"format_version": 2}', '{"surprise": 1}'])
def test_index__of_another_form_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text(content)
    with pytest.raises(DamagedError, match="is not an index"):
        Zoo(FolderStorage(tmp_path)).read_index()


ERRORS = [
    (["show", "tiny/strid"], "Did you mean 'tiny/stride'"),
    (["show", "nothing"], "unknown zoo entry 'nothing'"),
    (["show", "nothing"], "moecast zoo pull NAME zoo=ADDRESS"),
    (["show", "tiny/stride@00000000"], "unknown version of tiny/stride"),
    (["pull", "tiny/stride", "zoo=nowhere"], "nowhere is not a zoo"),
    (["pull", "tiny/stride", "zoo=https:///x"], "cannot be reached"),
    (["pull", "tiny/stride", "zoo=hf://x"], "is not hf://OWNER/REPO"),
    (["pull", "tiny/stride", "zoo=nope://x"], "use https://, s3:// or hf://"),
    (["pull", "tiny/stride"], "no zoo to pull from"),
    (["pull", "zoo=builtin"], "give one of name=NAME, all=true and locked=zoo.lock"),
    (["push", "nowhere", "zoo=https://x/zoo"], "is read-only"),
    (["pull", "../x", "zoo=builtin"], "is not NAME"),
    (["push", "nowhere"], "nowhere is not a zoo entry"),
    (["push", "nowhere"], "`moecast train` writes entries"),
    (["promote", "tiny/strid", "production"], "unknown zoo entry 'tiny/strid'. Did you mean"),
    (["promote", "tiny/stride@candidate", "x"], "unknown version of tiny/stride 'candidate'"),
    (["promote", "tiny/stride", "latest"], "neither latest nor a digest"),
    (["promote", "tiny/stride", "deadbeef"], "neither latest nor a digest"),
    (["promote", "tiny/stride", "Stable"], "neither latest nor a digest"),
    (["promote", "tiny/stride", "production", "max_drop=-1"], "must be at least 0"),
]


@pytest.mark.parametrize(("arguments", "message"), ERRORS)
def test_error__names_cause_and_next_step(arguments: list[str], message: str, refused: Refused):
    publish(cache_storage())
    error = refused(*arguments)
    assert message in error
    assert error.count("\n") == 1


def test_builtin_zoo__is_complete_and_publishable() -> None:
    place = Zoo(FolderStorage(BUILTIN))
    for name in place.read_index(required=True).entries:
        check_publishable(place.open(EntryReference(name)))
