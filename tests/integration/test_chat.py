"""`moecast chat` as people and pipes use it."""

import io
import json
import os
import pty
import re
import select
import subprocess
import sys
import time

import pytest

from configs.program import run_program
from tests.builders.processes import ROOT

OPTIONS = ["temperature=0", "budget=50%"]
COMMAND = [sys.executable, "-m", "runtime", "chat", *OPTIONS]
MANY_TOKENS = 1800
LONG_ANSWERS = [f"max_new_tokens={MANY_TOKENS}"]
"""Enough tokens that Ctrl-C comes before the last one, even if this process is slow."""
ON_TERMINAL = """import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])"""
"""Makes standard input the process's own terminal, so that ^C reaches it as a signal."""
WAIT_SECONDS = 240.0


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


class Terminal:
    """A chat on a separate terminal."""

    def __init__(self, folder):
        self._master, slave = pty.openpty()
        command = [sys.executable, "-c", ON_TERMINAL, *COMMAND, *LONG_ANSWERS, f"run_dir={folder}"]
        options = {"cwd": ROOT, "env": {**os.environ, "TERM": "xterm", "COLUMNS": "100"}}
        options |= dict.fromkeys(("stdin", "stdout", "stderr"), slave)
        self.process = subprocess.Popen(command, start_new_session=True, **options)
        os.close(slave)
        self.text = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def wait_for(self, pattern: str, *, typing: str = "") -> str:
        """Return what was shown since the last time, up to the pattern.

        Args:
            typing: typed every five seconds until the pattern is shown.
        """
        start = typed = time.monotonic()
        while not (found := re.search(pattern, self.text, re.DOTALL)):
            assert time.monotonic() < start + WAIT_SECONDS, self.text
            if time.monotonic() > typed + 5:
                self.type(typing)
                typed = time.monotonic()
            if select.select([self._master], [], [], 0.2)[0]:
                self.text += os.read(self._master, 4096).decode(errors="replace")
        shown, self.text = self.text[: found.end()], self.text[found.end() :]
        return shown

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._master)


@pytest.fixture
def terminal(tmp_path):
    made = Terminal(tmp_path)
    yield made
    made.close()


def test_terminal__ctrl_c_stops_the_answer_and_not_the_program(terminal, tmp_path):
    terminal.wait_for("/help lists the commands.*> ")
    terminal.type("\x03")
    # Python acts on a signal between the prompt's last character and the wait for a key only when
    # the line ends, or with the next signal that comes during the wait.
    terminal.wait_for("/quit or Ctrl-D ends.*> ", typing="\x03")
    terminal.type("Tell me a long story\r")
    terminal.wait_for(r"story\r\n.{40}")  # it has begun to answer
    terminal.type("\x03")
    terminal.wait_for(r"stopped.*tokens, first after .* tokens/s, hits \d+ %.*> ")
    terminal.type("/stats\r")
    assert "hits" in terminal.wait_for("peak memory of the process.*> ")
    terminal.type("\x04")
    assert terminal.process.wait(WAIT_SECONDS) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert (results["num_answers"], results["num_interrupted"]) == (1, 1)
    assert 1 < results["num_tokens"] < MANY_TOKENS
