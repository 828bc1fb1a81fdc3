"""What the terminal shows of an answer, and what a chat outlasts."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console
from transformers import AutoTokenizer

from runtime.commands.chat import ChatTerminal, summarize_answer
from runtime.config import BUILTIN_MODELS
from runtime.errors import TransferError
from runtime.generation.answer import Answer, TokenDelta
from runtime.generation.chat_template import Conversation
from runtime.generation.config import ChatConfig

MODEL = BUILTIN_MODELS / "qwen2_moe_tiny"


class FakeModel:
    """Says yes and keeps what it was asked, or fails where it is asked to."""

    def __init__(self, tokenizer) -> None:
        self._tokenizer = tokenizer
        self.asked: list[str] = []
        self.room: list[int] = []

    def generate(self, answer: Answer, prompt: list[int], max_new_tokens: int) -> None:
        self.asked.append(self._tokenizer.decode(prompt))
        self.room.append(max_new_tokens)
        if "fail" in self.asked[-1]:
            raise TransferError("the disk is gone")
        answer._deliver(TokenDelta(text="yes", token=1))


def make_chat(console: Console, *, context: int = 2048) -> tuple[ChatTerminal, FakeModel]:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = FakeModel(tokenizer)
    handle = SimpleNamespace(stats=lambda: {"requests": 1, "hits": 1})
    conversation = Conversation(tokenizer, context, max_new_tokens=100)
    config = ChatConfig(max_new_tokens=100)
    return ChatTerminal(console, handle, config, conversation, Answer, model.generate), model


def talk(monkeypatch: pytest.MonkeyPatch, text: str, *, context: int = 2048) -> FakeModel:
    """A conversation in a pipe."""
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    chat, model = make_chat(Console(file=io.StringIO()), context=context)
    chat.talk()
    return model


def test_chat__a_read_that_fails_ends_that_answer_and_is_forgotten(monkeypatch, capsys):
    answering = talk(monkeypatch, "first\nfail\nsecond\n")
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

    typed = iter([KeyboardInterrupt(), "hello\\", KeyboardInterrupt(), "hello", "/quit"])

    def type_line(prompt: str) -> str:
        line = next(typed)
        if isinstance(line, KeyboardInterrupt):
            raise line
        return line

    monkeypatch.setattr("builtins.input", type_line)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    shown = io.StringIO()
    chat, answering = make_chat(Terminal(file=shown, force_terminal=True, highlight=False))
    chat.talk()
    assert len(answering.asked) == 1
    assert "hello<|im_end|>" in answering.asked[0]
    assert shown.getvalue().count("/quit or Ctrl-D ends") == 2


def test_chat__says_what_it_forgets_when_the_context_is_full(monkeypatch, capsys):
    answering = talk(monkeypatch, "one " * 30 + "\n" + "two " * 30 + "\nthree\n", context=80)
    said = capsys.readouterr().err
    assert said.count("exceed the model's context of 80 tokens and were dropped") == 1
    assert "the oldest 2 messages" in said
    assert "one" not in answering.asked[-1]
    assert all(room <= 80 for room in answering.room)


def test_chat__escaped_slash_and_trailing_backslash(monkeypatch: pytest.MonkeyPatch) -> None:
    answering = talk(monkeypatch, "//etc\\\nmore\n/reset\nlast\\")
    assert "/etc\nmore<|im_end|>" in answering.asked[0]
    assert "//etc" not in answering.asked[0]
    assert len(answering.asked) == 2
    assert "etc" not in answering.asked[1]
    assert "last" in answering.asked[1]


def test_summary__counts_this_answers_requests_only() -> None:
    answer = Answer(lambda _: None)
    before = {"requests": 100, "hits": 10}
    assert summarize_answer(answer, before, before) == "0 tokens"
    answer.num_tokens, answer.started_at = 5, 10.0
    answer.first_token_at, answer.last_token_at = 11.0, 13.0
    line = summarize_answer(answer, before, {"requests": 140, "hits": 40})
    assert line == "5 tokens, first after 1.00 s, 2.0 tokens/s, hits 75 %"
