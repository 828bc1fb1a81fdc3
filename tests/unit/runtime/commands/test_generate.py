"""The command `generate`: the text alone on stdout, as it comes; figures on stderr."""

import io
import sys
from dataclasses import replace
from typing import Any

import pytest

from runtime.commands import generate
from runtime.commands.generate import generate_streamed, run
from runtime.config import BUILTIN_MODELS, GenerateConfig, ModelConfig
from runtime.hf.tokens import load_tokenizer

TOKENIZER = load_tokenizer(BUILTIN_MODELS / "qwen2_moe_tiny")


class RecordedStdout(io.StringIO):
    """A stdout that keeps each write, and may be a terminal."""

    def __init__(self, *, is_terminal: bool = False) -> None:
        super().__init__()
        self.pieces: list[str] = []
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal

    def write(self, text: str) -> int:
        self.pieces.append(text)
        return super().write(text)


def stream(
    monkeypatch: pytest.MonkeyPatch, tokens: list[int], *, is_terminal: bool = False
) -> list[str]:
    """Return what is written to stdout after each of the tokens."""
    stdout = RecordedStdout(is_terminal=is_terminal)
    monkeypatch.setattr(sys, "stdout", stdout)

    def fake_generate(
        _model: Any, _prompt: Any, _config: Any, on_token: Any, _drafting: Any
    ) -> list[int]:
        for token in tokens:
            on_token(token)
        return tokens

    monkeypatch.setattr(generate, "generate", fake_generate)
    model: Any = None
    _, times = generate_streamed(model, [1, 2], GenerateConfig(), TOKENIZER, {})
    assert (times.num_prompt_tokens, times.num_tokens) == (2, len(tokens))
    assert 0 < times.first_token_seconds <= times.seconds
    return stdout.pieces


def test_generate__stdout_has_the_text_alone(capsys: pytest.CaptureFixture[str]) -> None:
    results = run(GenerateConfig(max_new_tokens=6, budget="50%"))
    captured = capsys.readouterr()
    assert captured.out == results["text"]
    assert "tokens/s" in captured.err
    assert "time to first token (TTFT)" in captured.err
    assert results["answer"]["num_tokens"] == len(results["tokens"]) == 6
    assert results["answer"]["num_prompt_tokens"] == len(results["prompt_tokens"])


@pytest.mark.parametrize("draft", ["prompt-lookup", str(BUILTIN_MODELS / "qwen2_moe_tiny")])
def test_generate__with_drafts_has_the_same_tokens(draft: str) -> None:
    """The model itself is the draft model: nothing that it drafts is rejected."""
    config = GenerateConfig(
        prompt="one two three one two three one two",
        max_new_tokens=12,
        budget="100%",
        model=ModelConfig(dtype="float32"),
    )
    results = run(replace(config, draft=draft))
    assert results["tokens"] == run(config)["tokens"]
    drafts = results["drafts"]
    assert drafts["plain_seconds"] > 0
    if draft != "prompt-lookup":
        assert drafts["num_accepted"] == drafts["num_drafted"]


def test_stream__a_characters_bytes_are_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "a🙂b"
    tokens = TOKENIZER(text)["input_ids"]
    assert len(tokens) > 3, "the character is several tokens"
    pieces = stream(monkeypatch, tokens)
    assert "".join(pieces) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    assert pieces.count("a") == pieces.count("🙂") == pieces.count("b") == 1


def test_stream__bytes_that_never_became_a_character_are_written_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokens = TOKENIZER("a🙂")["input_ids"][:-1]
    assert "".join(stream(monkeypatch, tokens)).startswith("a\N{REPLACEMENT CHARACTER}")


def test_stream__control_characters_reach_files_only(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = TOKENIZER("a\x1b[2Jb")["input_ids"]
    assert "".join(stream(monkeypatch, tokens)) == "a\x1b[2Jb"
    assert "".join(stream(monkeypatch, tokens, is_terminal=True)) == "a[2Jb\n"
