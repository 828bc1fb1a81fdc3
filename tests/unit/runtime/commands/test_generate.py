"""The command `generate`: the text alone on stdout, as it comes; figures on stderr."""

import io
import sys
from dataclasses import replace

import pytest

from runtime.commands.generate import run, write_text
from runtime.config import BUILTIN_MODELS, GenerateConfig, ModelConfig
from tests.unit.runtime.generation.test_drafting import EagerPace


def test_generate__with_drafts_has_the_same_tokens(capsys, monkeypatch):
    """The model itself is the draft model: nothing that it drafts is rejected.

    Standard output has the text alone.
    """
    monkeypatch.setattr("runtime.commands.generate.DraftPace", EagerPace)
    options = {"prompt": "one two three one two three one two", "max_new_tokens": 12}
    config = GenerateConfig(budget="100%", model=ModelConfig(dtype="float32"), **options)
    results = run(replace(config, draft=str(BUILTIN_MODELS / "qwen2_moe_tiny"), budget="auto"))
    written, errors = capsys.readouterr()
    assert written == results["text"] + "\n"
    for figure in ("MiB for the draft model", "tokens/s", "time to first token (TTFT)"):
        assert figure in errors
    assert results["tokens"] == run(config)["tokens"]
    assert results["answer"]["num_tokens"] == len(results["tokens"]) == 12
    assert results["answer"]["num_prompt_tokens"] == len(results["prompt_tokens"])
    drafts = results["drafts"]
    assert drafts["plain_seconds"] > 0
    assert drafts["num_accepted"] == drafts["num_drafted"] > 0


def test_text__has_no_control_characters_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "a\x1b[2Jb\tc\nd\x9bm\r\x07é"
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    for stdout, expected in (io.StringIO(), text), (terminal, "a[2Jb\tc\ndmé"):
        monkeypatch.setattr(sys, "stdout", stdout)
        write_text(text)
        assert stdout.getvalue() == expected
