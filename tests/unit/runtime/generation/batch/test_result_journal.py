"""Results on disk: nothing lost, nothing twice, nothing of another run."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import ResultFileError
from runtime.generation.batch.result_journal import BatchResult, ResultJournal

SETTINGS = {"input_sha256": "aa", "batch_size": 4}
KNOWN = ["a", 1, "é\n", 3]


def result(own, text="some text\n"):
    return BatchResult(own, text, [1, 2, 3], "length")


def journal(folder, settings=SETTINGS, **options):
    return ResultJournal(folder / "out.jsonl", settings, known=KNOWN, **options)


def assert_refused(folder, said, settings=SETTINGS):
    with pytest.raises(ResultFileError, match=said):
        journal(folder, settings)


def lines(folder):
    return [json.loads(one) for one in (folder / "out.jsonl").read_bytes().splitlines()]


def test_journal__goes_on_where_it_was(tmp_path):
    with journal(tmp_path) as first:
        first.append(result("a"))
        first.append(result("é\n", text=None))
    with journal(tmp_path) as second:
        assert list(second.done) == ["a", "é\n"]
        second.append(result(1))
    line = {"id": 1, "text": "some text\n", "tokens": [1, 2, 3], "finish_reason": "length"}
    assert lines(tmp_path)[2] == line
    assert [one["id"] for one in lines(tmp_path)] == ["a", "é\n", 1]


@given(cut=st.integers(0, 400), junk=st.binary(max_size=6))
def test_journal__repairs_whatever_a_kill_leaves_of_its_last_writes(tmp_path_factory, cut, junk):
    folder = tmp_path_factory.mktemp("cut")
    with journal(folder) as whole:
        for own in KNOWN:
            whole.append(result(own))
    path = folder / "out.jsonl"
    raw = path.read_bytes()
    # A write that was cut short; bytes that a power cut left behind it are no line of ours.
    path.write_bytes(raw[:cut] + (junk.replace(b"\n", b"") if cut < len(raw) else b""))
    expected = [json.loads(one)["id"] for one in raw[: raw.rfind(b"\n", 0, cut) + 1].splitlines()]
    with journal(folder) as again:
        assert list(again.done) == expected
        for own in KNOWN:
            if own not in again.done:
                again.append(result(own))
    assert path.read_bytes() == raw


def test_journal__several_torn_lines_at_the_end_are_taken_back(tmp_path):
    with journal(tmp_path) as first:
        first.append(result("a"))
    with (tmp_path / "out.jsonl").open("ab") as file:
        file.write(b"\0\0\0\n\0\0\n{")
    with journal(tmp_path) as again:
        assert list(again.done) == ["a"]
    assert [one["id"] for one in lines(tmp_path)] == ["a"]


NOT_ITS_OWN = [
    ("torn\n" + json.dumps(vars(result(1))) + "\n", "line 3: id 1 .* follows a damaged"),
    (json.dumps(vars(result("a"))) + "\n", "line 2: id 'a' .* appears twice"),
    (json.dumps(vars(result("b"))) + "\n", "line 2: id 'b' is not of the input"),
]


@pytest.mark.parametrize(("added", "said"), NOT_ITS_OWN)
def test_journal__what_it_did_not_write_is_refused_and_kept(tmp_path, added, said):
    with journal(tmp_path) as first:
        first.append(result("a"))
    path = tmp_path / "out.jsonl"
    path.write_text(path.read_text() + added)
    before = path.read_bytes()
    assert_refused(tmp_path, said)
    assert path.read_bytes() == before


def test_journal__other_settings_are_refused_by_name(tmp_path):
    journal(tmp_path).close()
    assert_refused(tmp_path, "batch_size was 4 and is 8", {**SETTINGS, "batch_size": 8})
    assert_refused(tmp_path, "window was None and is 5", {**SETTINGS, "window": 5})
    with journal(tmp_path, {**SETTINGS, "batch_size": 8}, overwrite=True) as new:
        assert not new.done
    assert_refused(tmp_path, "batch_size was 8 and is 4")


def test_journal__another_file_is_not_taken_for_its_own(tmp_path):
    (tmp_path / "out.jsonl").write_text("my notes\n")
    assert_refused(tmp_path, "is not empty")
    assert (tmp_path / "out.jsonl").read_text() == "my notes\n"


def test_journal__refuses_a_path_that_is_no_file():
    with pytest.raises(ResultFileError, match="not a regular file"):
        ResultJournal(Path("/dev/null"), SETTINGS, known=KNOWN)


def test_journal__one_process_at_a_time(tmp_path):
    with journal(tmp_path):
        assert_refused(tmp_path, "another process is writing")
    journal(tmp_path).close()


def test_journal__a_full_disk_leaves_whole_lines(tmp_path, monkeypatch):
    real = os.write

    def full(handle, data):
        if len(data) > 10:
            return real(handle, data[:7])
        raise OSError(28, "No space left on device")

    with journal(tmp_path) as first:
        first.append(result("a"))
        monkeypatch.setattr(os, "write", full)
        with pytest.raises(ResultFileError, match=r"No space left.*run the same command again"):
            first.append(result(1))
        monkeypatch.undo()
        first.append(result(3))
    assert [one["id"] for one in lines(tmp_path)] == ["a", 3]
