"""Several publishers of one bucket at once: no listing is lost."""

import logging
from collections.abc import Callable
from functools import partial
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.builders.entries import tiny_entry
from tests.builders.stores import s3_bucket
from tests.builders.turns import Bucket, BucketStorage, run_in_turns
from zoo.catalog import WritableZoo, Zoo
from zoo.entry import ZooEntry, open_entry
from zoo.errors import ConflictError, UnreachableError
from zoo.index import INDEX, EntryReference
from zoo.storage.remote import ObjectStorage

LOST = "one's listing may be lost"


@pytest.fixture(scope="module")
def entries(tmp_path_factory: pytest.TempPathFactory) -> list[ZooEntry]:
    """Two names with two versions each."""
    folder = tmp_path_factory.mktemp("entries")
    kinds = product(("tiny/stride", "tiny/token"), ("MIT", "Apache-2.0"))
    for number, (name, licence) in enumerate(kinds):
        tiny_entry(folder / f"{number}", name=name, licence=licence)
    return [open_entry(folder / f"{number}") for number in range(4)]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zoo.catalog.time.sleep", lambda _: None)


def publish(bucket: Bucket, *entries: ZooEntry, alias: str | None = None) -> None:
    zoo = WritableZoo(BucketStorage(bucket))
    for entry in entries:
        zoo.add(entry, alias=alias)


def promote(bucket: Bucket, entry: ZooEntry, seen: list[str | None]) -> None:
    """Moves `production` to a version; `seen` gets the digest that it named before."""
    reference = EntryReference(entry.manifest.name, entry.manifest.digest)
    zoo = WritableZoo(BucketStorage(bucket))
    _, earlier = zoo.move_alias(reference, "production", check=lambda *_: None)
    seen.append(None if earlier is None else earlier.manifest.digest)


@settings(max_examples=60)
@given(
    shares=st.lists(st.integers(0, 3), min_size=4, max_size=4),
    turns=st.lists(st.integers(0, 3), max_size=120),
    losses=st.lists(st.booleans(), max_size=12),
    refusal=st.sampled_from(["PreconditionFailed", "ConditionalRequestConflict"]),
)
def test_publishers__in_any_order_lose_no_listing(shares, turns, losses, refusal, entries):
    lost = iter(losses)
    bucket = Bucket(refusal=refusal, loses_answer=lambda: next(lost, False))
    own = [[one for one, to in zip(entries, shares, strict=True) if to == i] for i in range(4)]
    jobs: list[Callable[[], None]] = [partial(publish, bucket, *several) for several in own]
    run_in_turns(jobs, turns)
    zoo = Zoo(BucketStorage(bucket))
    index = zoo.read_index(required=True)
    listed = {digest for one in index.entries.values() for digest in one.versions}
    assert listed == {entry.manifest.digest for entry in entries}
    if not any(losses):  # after a lost answer, a publisher may have to be the latest once more
        assert index.serial == len(entries), "each publication is one change of the index"
    for name, listing in index.entries.items():
        for digest in listing.versions:
            zoo.open(EntryReference(name, digest)).verify()


@settings(max_examples=30)
@given(turns=st.lists(st.integers(0, 1), max_size=40))
def test_promotions__of_two_at_once_see_each_other(turns: list[int], entries: list[ZooEntry]):
    """The gate of the second compares with the version that the first has promoted."""
    bucket = Bucket()
    publish(bucket, *entries[:2])
    seen: tuple[list[str | None], list[str | None]] = ([], [])
    run_in_turns([partial(promote, bucket, entries[i], seen[i]) for i in range(2)], turns)
    digests = [entry.manifest.digest for entry in entries[:2]]
    last = Zoo(BucketStorage(bucket)).read_index().entries["tiny/stride"].aliases["production"]
    first = digests[1 - digests.index(last)]
    assert seen[digests.index(last)] == [first]
    assert seen[digests.index(first)] == [None]


def test_promotion__whose_answer_is_lost_is_made_once(entries: list[ZooEntry]) -> None:
    bucket = Bucket()
    publish(bucket, *entries[:2])
    losses = iter([True])
    bucket.loses_answer = lambda: next(losses, False)
    seen: list[str | None] = []
    promote(bucket, entries[0], seen)
    assert seen == [None]
    assert next(losses, None) is None
    assert Zoo(BucketStorage(bucket)).read_index().serial == 3


def test_store__that_ignores_conditions_is_found_out(entries, caplog):
    bucket = Bucket(minds_conditions=False)
    publish(bucket, entries[0])
    assert LOST in caplog.text
    assert not [name for name in bucket.objects if "probe" in name]
    # Both read the empty index before either writes: this is what the warning is about.
    bucket = Bucket(minds_conditions=False)
    run_in_turns([partial(publish, bucket, entries[i]) for i in (0, 2)], [0, 1] * 40)
    assert len(Zoo(BucketStorage(bucket)).read_index().entries) == 1


def test_conflict__without_end_is_reported(entries: list[ZooEntry]) -> None:
    bucket = Bucket()
    publish(bucket, entries[0])
    before = bucket.objects[f"bucket/zoo/{INDEX}"]
    bucket.refuses["pipe_file"] = "ConditionalRequestConflict"
    storage = BucketStorage(bucket)
    storage.__dict__["_has_conditional_writes"] = True
    with pytest.raises(ConflictError, match=r"is being changed by other publishers .* try again"):
        WritableZoo(storage).remove(EntryReference("tiny/stride"))
    assert bucket.objects[f"bucket/zoo/{INDEX}"] == before


REMEDIES = [
    ("ExpiredToken", "your credentials have expired: log in again"),
    ("InvalidAccessKeyId", "the store does not know these credentials"),
    ("RequestTimeTooSkewed", "the clock of this machine is off"),
    ("SlowDown", "the store takes no more requests"),
    ("Other", "check the address, the network and your credentials"),
]


@pytest.mark.parametrize(("code", "advice"), REMEDIES)
def test_refusal__names_the_remedy_even_if_the_answer_has_no_body(code: str, advice: str) -> None:
    with pytest.raises(UnreachableError, match=rf"zoo/index\.json .*\({code}\).*; {advice}"):
        BucketStorage(Bucket(refuses={"info": "403", "ls": code})).has(INDEX)


@pytest.mark.parametrize("begun", [False, True], ids=["first index", "changed index"])
def test_s3__keeps_the_listings_of_two_publishers(begun, entries, tmp_path, monkeypatch, caplog):
    write, between = ObjectStorage.write_index, []

    def write_second(self: ObjectStorage, path: str, data: bytes, seen: str | None) -> None:
        if between:
            WritableZoo(ObjectStorage(self.url)).add(between.pop())
        write(self, path, data, seen)

    monkeypatch.setattr(ObjectStorage, "write_index", write_second)
    caplog.set_level(logging.WARNING)
    with s3_bucket(f"{tmp_path.name}{begun}", monkeypatch) as bucket:
        zoo = WritableZoo(ObjectStorage(f"{bucket}/zoo"))
        if begun:
            zoo.add(entries[0])
        between.append(entries[2])
        zoo.add(entries[1])
        assert not between
        index = zoo.read_index()
        assert len(index.entries["tiny/stride"].versions) == (2 if begun else 1)
        assert list(index.entries["tiny/token"].versions) == [entries[2].manifest.digest]
        assert zoo.storage.names() == ["blobs", INDEX]
    assert LOST not in caplog.text
