"""Results of unclean code are refused, and those older than their code are named."""

import json
from pathlib import Path

import pytest

from benchmarks import reports
from benchmarks.process import ROOT
from benchmarks.tables import origins
from predictors.origin import read_git_revision
from runtime.sim.hardware import LATENCY_FILE
from tests.builders.processes import run


def test_committed_results__are_of_committed_code() -> None:
    assert not origins.refuse_unclean()


def test_every_result__names_its_code() -> None:
    results = {path.stem for path in (*reports.RESULTS.glob("*.json"), LATENCY_FILE)}
    assert results == {*origins.CODE}
    for name, code in origins.CODE.items():
        paths = (path.removeprefix(":!") for paths in code for path in paths.split())
        assert all(any(ROOT.glob(path)) for path in paths), name


def write_results(folder: Path, monkeypatch: pytest.MonkeyPatch, **results: object) -> None:
    for name, document in results.items():
        (folder / f"{name}.json").write_text(json.dumps(document))
    monkeypatch.setattr(reports, "RESULTS", folder)
    monkeypatch.setattr(origins, "CODE", dict.fromkeys(results, ("served", "learned.py")))


def of(revision: str | None, command: str = "python -m benchmarks drafts") -> dict[str, object]:
    return {"origin": {"command": command, "revision": revision}}


def test_unclean_results__are_refused_with_their_command(tmp_path, monkeypatch, capsys) -> None:
    clean = "a" * 40
    parts = {"one": of(clean), "two": of(None, "python -m benchmarks peers"), "three": {}}
    write_results(tmp_path, monkeypatch, dirty=of(f"{clean}-dirty"), clean=of(clean), parts=parts)
    assert origins.refuse_unclean() == ["dirty", "parts"]
    assert capsys.readouterr().err.splitlines() == [
        "refused: dirty: measured with uncommitted code; again: python -m benchmarks drafts",
        "refused: parts, two: measured without a revision; again: python -m benchmarks peers",
        "refused: parts, three: measured without a revision; again: a command that was not "
        "recorded",
    ]


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=n", "-c", "user.email=n@localhost", "-c", "commit.gpgsign=false")
    return run("git", "-C", folder, *identity, *words).stdout.strip()


def test_revision__is_dirty_after_edits_of_code_alone(tmp_path: Path) -> None:
    assert read_git_revision(tmp_path) is None
    git(tmp_path, "init", "-q")
    result = tmp_path / "benchmarks" / "results" / "bench.json"
    result.parent.mkdir(parents=True)
    result.touch()
    (tmp_path / "loop.py").touch()
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "all")
    commit = git(tmp_path, "rev-parse", "HEAD")
    result.write_text("{}")
    assert read_git_revision(tmp_path) == commit
    (tmp_path / "loop.py").write_text("pass")
    assert read_git_revision(tmp_path) == f"{commit}-dirty"


def test_results__that_are_older_than_their_code_are_named(tmp_path, monkeypatch, capsys):
    git(tmp_path, "init", "-q")
    (tmp_path / "served").mkdir()
    revisions = []
    for path in ("served/loop.py", "served/cache.py", "learned.py", "page.md"):
        (tmp_path / path).touch()
        git(tmp_path, "add", path)
        git(tmp_path, "commit", "-q", "-m", path)
        revisions.append(git(tmp_path, "rev-parse", "HEAD"))
    first, second, third, _ = revisions
    (tmp_path / "learned.py").write_text('"""Words are no code."""  # nor is this\n')
    git(tmp_path, "commit", "-q", "-a", "-m", "words")
    monkeypatch.setattr(origins, "ROOT", tmp_path)
    results = tmp_path / "results"
    results.mkdir()
    named = {"old": of(first), "older": of(second), "new": of(third), "unknown": of("0" * 40)}
    write_results(results, monkeypatch, **named, unclean=of(f"{first}-dirty"))
    origins.warn_of_changes()
    assert capsys.readouterr().err.splitlines() == [
        f"files of code changed since old ({first[:10]}): served: 1, learned.py: 1",
        f"files of code changed since older ({second[:10]}): learned.py: 1",
        "files of code changed since unknown (0000000000) are not known: this checkout does not "
        "have it",
    ]


def test_results__outside_a_checkout_are_not_compared_with_their_code(monkeypatch, capsys):
    monkeypatch.setattr(origins, "read_git_revision", lambda: None)
    origins.warn_of_changes()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("not a git checkout: ")
