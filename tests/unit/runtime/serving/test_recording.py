"""Recording appends prompts' token ids to a file of the owner's, and harms no request."""

import json
import os
import stat
from pathlib import Path

import pytest

from predictors.errors import MoecastError
from runtime.generation.sampling import SamplingParams
from runtime.serving.choice import CompletionChoice, FinishReason
from runtime.serving.observe.recording import PromptRecorder


def ended(tokens: list[int], reason: FinishReason = FinishReason.STOP) -> CompletionChoice:
    choice = CompletionChoice(tokens, SamplingParams(max_new_tokens=4), deliver=lambda _: None)
    choice.finish_reason = reason
    return choice


def make(path: Path, **options: object) -> PromptRecorder:
    return PromptRecorder(path, **{"fraction": 1.0, "max_bytes": 1 << 20} | options)  # type: ignore[arg-type]


def recorded(path: Path) -> list[list[int]]:
    return [json.loads(line)["tokens"] for line in path.read_text().splitlines()]


def test_file__is_its_owners_and_continued(tmp_path: Path) -> None:
    path = tmp_path / "served.jsonl"
    for number in (1, 2):
        make(path).on_ended(ended([number, 7]))
    assert recorded(path) == [[1, 7], [2, 7]]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.rename(tmp_path / "moved")
    # An editor may leave the last line without an end.
    path.write_text('{"tokens": [3]}')
    recorder = make(path)
    recorder.on_ended(ended([4]))
    assert recorder.status() == {"is_active": True, "num_requests": 1}
    assert recorded(path) == [[3], [4]]


def test_sample__has_complete_answers_only(tmp_path: Path, monkeypatch) -> None:
    draws = iter([0.3, 0.5, 0.1])
    monkeypatch.setattr("random.random", lambda: next(draws))
    recorder = make(tmp_path / "f", fraction=0.4)
    recorder.on_ended(ended([9], FinishReason.ABORT))
    recorder.on_ended(ended([9], FinishReason.ERROR))
    for number in range(3):
        recorder.on_ended(ended([number], FinishReason.LENGTH))
    assert recorded(tmp_path / "f") == [[0], [2]]


def test_size__pauses_until_the_file_is_moved_away(tmp_path, caplog):
    path = tmp_path / "f"
    recorder = make(path, max_bytes=40)
    for _ in range(9):
        recorder.on_ended(ended([1, 2, 3]))
    assert path.stat().st_size <= 40
    assert len(caplog.records) == 1
    path.unlink()
    recorder.on_ended(ended([4]))
    assert recorded(path) == [[4]]


@pytest.mark.parametrize("takes", [0, 5])
def test_full_disk__ends_the_recording_with_one_warning(tmp_path, caplog, monkeypatch, takes):
    recorder = make(tmp_path / "f")
    recorder.on_ended(ended([1]))
    write = os.write

    def fail(descriptor: int, content: bytes) -> int:
        if not takes:
            raise OSError(28, "No space left on device")
        return write(descriptor, content[:takes])

    monkeypatch.setattr(os, "write", fail)
    recorder.on_ended(ended([2]))
    monkeypatch.undo()
    recorder.on_ended(ended([3]))
    assert recorded(tmp_path / "f") == [[1]]
    assert recorder.status() == {"is_active": False, "num_requests": 1}
    (line,) = caplog.records
    assert "has ended" in line.getMessage()
    assert "serving goes on" in line.getMessage()


NO_FILES = {
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
    "link": lambda path: path.symlink_to("other"),
    "no folder/file": lambda path: path,
}


@pytest.mark.parametrize("name", NO_FILES)
def test_what_is_no_file__is_refused_at_once(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    NO_FILES[name](path)
    with pytest.raises(MoecastError, match=r"record=.* cannot be written .*: name another file"):
        make(path)
