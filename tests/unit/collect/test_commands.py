"""`moecast collect` as its user meets it: exit codes, one line, results.json."""

import json
from pathlib import Path

import pytest

from collect.traces import Trace
from configs.program import run_program
from tests.builders.recordable import prompts_file, recordable


def options(tmp_path: Path, **changed: str) -> list[str]:
    """A command line for the tiny model in `tmp_path`."""
    values = {
        "model.name": "tiny", "model.id": str(tmp_path / "model"), "data": "jsonl",
        "data.path": str(tmp_path / "prompts.jsonl"), "data.min_chars": "1",
        "data.max_new_tokens": "2", "output": str(tmp_path / "trace"),
        "run_dir": str(tmp_path / "run"),
    }  # fmt: skip
    return [f"{key}={value}" for key, value in {**values, **changed}.items()]


def test_collect__says_what_it_will_write_and_what_it_made(tmp_path, capfd) -> None:
    recordable(tmp_path / "model")
    prompts_file(tmp_path / "prompts.jsonl", count=5)
    assert run_program("collect", options(tmp_path)) == 0
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["digest"] == Trace.open(tmp_path / "trace").digest
    assert results["tokens"] == results["prefill_tokens"] + results["decode_tokens"]
    assert results["decode_tokens"] == 5 * 2
    assert "5 prompts to record in 1 of 1 parts, at most" in capfd.readouterr().err


BAD_INPUT = [
    ({"data": "jsonll"}, "unknown data 'jsonll'. Did you mean 'jsonl'?"),
    ({"data.path": "missing.jsonl"}, "missing.jsonl: no such file"),
    ({"signals": "[gate_inputs]"}, "unknown signal 'gate_inputs'. Did you mean 'gate_input'"),
    ({"data.chat": "true"}, "set data.chat=false"),
    ({"budget": "1KiB"}, "budget"),
]


@pytest.mark.parametrize(("changed", "message"), BAD_INPUT)
def test_collect__bad_input_is_one_line_and_code_2(tmp_path, capfd, changed, message) -> None:
    recordable(tmp_path / "model")
    prompts_file(tmp_path / "prompts.jsonl", count=2)
    assert run_program("collect", options(tmp_path, **changed)) == 2
    error = capfd.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    assert message in error
    assert not (tmp_path / "trace").exists()


def test_import__takes_the_file_as_its_first_word(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text('{"layer": 0, "experts": [1, 2]}\n{"layer": 1, "experts": [0, 2]}\n')
    arguments = ["import", str(log), f"output={tmp_path / 't'}", f"run_dir={tmp_path / 'run'}"]
    assert run_program("collect", arguments) == 0
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert (results["tokens"], results["signals"]) == (1, ["experts"])


def test_import__without_a_file_names_the_command(tmp_path, capfd) -> None:
    assert run_program("collect", ["import", f"run_dir={tmp_path}"]) == 2
    assert "moecast collect import FILE" in capfd.readouterr().err
