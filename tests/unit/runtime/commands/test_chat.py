"""What the terminal shows of an answer, and what a chat outlasts."""

import io
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from rich.console import Console

from runtime.commands.chat import ChatTerminal, summarize_answer
from runtime.errors import TransferError
from runtime.generation.answer import Answer, TokenDelta
from runtime.generation.chat_template import Conversation
from runtime.generation.config import ChatConfig
from tests.builders.plain_answers import TOKENIZER


class FakeModel:
    """Says yes and keeps what it was asked, or fails where it is asked to."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.room: list[int] = []

    def generate(self, answer: Answer, prompt: list[int], max_new_tokens: int) -> None:
        self.asked.append(TOKENIZER.decode(prompt))
        self.room.append(max_new_tokens)
        if "fail" in self.asked[-1]:
            raise TransferError("the disk is gone")
        answer._deliver(TokenDelta(text="yes", token=1))


def talk(console: Console, *, context: int = 2048) -> FakeModel:
    """Has a conversation by standard input; returns its model."""
    model = FakeModel()
    handle = SimpleNamespace(stats=lambda: {"requests": 1, "hits": 1})
    conversation = Conversation(TOKENIZER, context, max_new_tokens=100)
    config = ChatConfig(max_new_tokens=100)
    ChatTerminal(console, handle, config, conversation, Answer, model.generate).talk()
    return model


def pipe(monkeypatch: pytest.MonkeyPatch, text: str, **options: int) -> FakeModel:
    """A conversation in a pipe."""
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    return talk(Console(file=io.StringIO()), **options)


def test_chat__a_read_that_fails_ends_that_answer_and_is_forgotten(monkeypatch, capsys):
    answering = pipe(monkeypatch, "first\nfail\nsecond\n")
    assert "error: the disk is gone" in capsys.readouterr().err
    last = answering.asked[-1]
    assert "fail" not in last
    assert last.index("first") < last.index("yes") < last.index("second")


def test_chat__ctrl_c_ends_neither_the_program_nor_its_hint(monkeypatch):
    class Terminal(Console):
        left = 1

        def print(self, *objects, **options) -> None:
            """The second Ctrl-C comes while the hint to the first is printed."""
            if "/quit or Ctrl-D ends" in str(objects) and self.left:
                self.left -= 1
                raise KeyboardInterrupt
            super().print(*objects, **options)

    typed = [KeyboardInterrupt, "hello\\", KeyboardInterrupt, "hello", "/quit"]
    monkeypatch.setattr("builtins.input", Mock(side_effect=typed))
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    shown = io.StringIO()
    (asked,) = talk(Terminal(file=shown, force_terminal=True, highlight=False)).asked
    assert "hello<|im_end|>" in asked
    assert shown.getvalue().count("/quit or Ctrl-D ends") == 2


def test_chat__says_what_it_forgets_when_the_context_is_full(monkeypatch, capsys):
    answering = pipe(monkeypatch, "one " * 30 + "\n" + "two " * 30 + "\nthree\n", context=80)
    said = capsys.readouterr().err
    assert said.count("exceed the model's context of 80 tokens and were dropped") == 1
    assert "the oldest 2 messages" in said
    assert "one" not in answering.asked[-1]
    assert all(room <= 80 for room in answering.room)


def test_chat__escaped_slash_and_trailing_backslash(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = pipe(monkeypatch, "//etc\\\nmore\n/reset\nlast\\").asked
    assert "/etc\nmore<|im_end|>" in first
    assert "//etc" not in first
    assert "etc" not in second
    assert "last" in second


def test_summary__counts_this_answers_requests_only() -> None:
    answer = Answer(lambda _: None)
    before = {"requests": 100, "hits": 10}
    assert summarize_answer(answer, before, before) == "0 tokens"
    answer.num_tokens, answer.started_at = 5, 10.0
    answer.first_token_at, answer.last_token_at = 11.0, 13.0
    line = summarize_answer(answer, before, {"requests": 140, "hits": 40})
    assert line == "5 tokens, first after 1.00 s, 2.0 tokens/s, hits 75 %"
