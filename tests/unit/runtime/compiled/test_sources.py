"""Compiled modules run only if they were made of the Python files that are there."""

import hashlib
import json
from pathlib import Path

import runtime.compiled
from runtime.compiled import SOURCES, VARIABLE, extend_path, find_changed, is_compiled


def write_package(folder: Path) -> Path:
    """Writes a package of one module that was compiled; returns the folder of compiled modules."""
    source, compiled = folder / "policy/tier.py", folder / "compiled"
    source.parent.mkdir()
    compiled.mkdir()
    source.write_text("A = 1\n")
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    (compiled / SOURCES).write_text(json.dumps({"policy/tier.py": digest}))
    return compiled


def test_find_changed__names_files_that_differ_or_are_missing(tmp_path) -> None:
    compiled = write_package(tmp_path)
    assert find_changed(compiled) == []
    (tmp_path / "policy/tier.py").write_text("A = 2\n")
    assert find_changed(compiled) == ["policy/tier.py"]
    (tmp_path / "policy/tier.py").unlink()
    assert find_changed(compiled) == ["policy/tier.py"]


def test_is_compiled__unless_files_changed_or_it_is_turned_off(tmp_path, monkeypatch, caplog):
    compiled = write_package(tmp_path)
    monkeypatch.setattr(runtime.compiled, "__file__", str(compiled / "__init__.py"))
    monkeypatch.setenv(VARIABLE, "0")
    assert not is_compiled.__wrapped__()
    monkeypatch.delenv(VARIABLE)
    assert is_compiled.__wrapped__()
    (tmp_path / "policy/tier.py").write_text("A = 2\n")
    assert not is_compiled.__wrapped__()
    assert "policy/tier.py changed after compilation" in caplog.text
    (compiled / SOURCES).unlink()
    assert not is_compiled.__wrapped__()


def test_extend_path__puts_compiled_modules_first(monkeypatch) -> None:
    compiled = str(Path(runtime.compiled.__file__).parent / "policy")
    for is_on, found in ((True, [compiled, "own"]), (False, ["own"])):
        monkeypatch.setattr(runtime.compiled, "is_compiled", lambda is_on=is_on: is_on)
        assert extend_path(["own"], "runtime.policy") == found
