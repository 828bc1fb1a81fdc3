"""`moecast chat` as people and pipes use it."""

import io
import json
import os
import re
import sys

import pexpect
import pytest

from configs.program import run_program
from tests.builders.processes import ROOT
from tests.builders.serving import WAIT_SECONDS
from tests.builders.waiting import wait_for

OPTIONS = ["temperature=0", "budget=50%"]
MANY_TOKENS = 1800
"""Enough tokens that Ctrl-C comes before the last one, even if this process is slow."""


def test_pipe__gets_answers_and_nothing_else(tmp_path, monkeypatch, capsys):
    too_long = "word " * 3000
    text = f"Hello\n/what\n/reset\n{too_long}\nHello\n\n/quit\nnever read\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    given = [*OPTIONS, f"run_dir={tmp_path}", "max_new_tokens=12"]
    assert run_program("runtime", ["chat", *given]) == 0
    written, errors = capsys.readouterr()
    lines = [one for one in written.split("\n") if one]
    # The conversation was reset: the same again.
    assert lines[: len(lines) // 2] == lines[len(lines) // 2 :] != []
    refusal = r"error: this message takes \d+ tokens .* context is 2048"
    for pattern in ("/what is not a command; /help lists them", "conversation reset", refusal):
        assert re.search(pattern, errors)
    written = (tmp_path / "results.json").read_text()
    results = json.loads(written)
    assert (results["num_answers"], results["num_tokens"], "Hello" in written) == (2, 24, False)
    assert results["stats"]["requests"] > 0


@pytest.fixture
def terminal(tmp_path):
    """A chat on a separate terminal."""
    own = [f"max_new_tokens={MANY_TOKENS}", f"run_dir={tmp_path}"]
    options = {"cwd": ROOT, "env": {**os.environ, "TERM": "xterm"}, "dimensions": (24, 100)}
    options |= {"encoding": "utf-8", "codec_errors": "replace", "timeout": WAIT_SECONDS}
    made = pexpect.spawn(sys.executable, ["-m", "runtime", "chat", *OPTIONS, *own], **options)
    yield made
    made.close(force=True)


def test_terminal__ctrl_c_stops_the_answer_and_not_the_program(terminal, tmp_path):
    terminal.expect("/help lists the commands.*> ")

    def is_hinted() -> bool:
        """Whether Ctrl-C shows how to end.

        Python acts on a signal between the prompt's last character and the wait for a key only
        when the line ends, or with the next signal that comes during the wait.
        """
        terminal.sendcontrol("c")
        return terminal.expect(["/quit or Ctrl-D ends.*> ", pexpect.TIMEOUT], timeout=5) == 0

    wait_for(is_hinted)
    terminal.send("Tell me a long story\r")
    terminal.expect(r"story\r\n.{40}")  # it has begun to answer
    terminal.sendcontrol("c")
    terminal.expect(r"stopped.*tokens, first after .* tokens/s, hits \d+ %.*> ")
    terminal.send("/stats\r")
    terminal.expect("hits.*peak memory of the process.*> ")
    terminal.sendeof()
    terminal.expect(pexpect.EOF)
    assert terminal.wait() == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert (results["num_answers"], results["num_interrupted"]) == (1, 1)
    assert 1 < results["num_tokens"] < MANY_TOKENS
