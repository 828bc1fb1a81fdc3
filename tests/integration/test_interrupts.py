"""Ctrl-C, sent to the whole process group as a terminal does, ends a command with one line."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def interrupt(arguments: Sequence[str], event: str, folder: Path) -> tuple[int, list[str]]:
    """Starts a command and interrupts it after an event in its output; exit code and the rest."""
    with subprocess.Popen(
        [sys.executable, "-u", "-m", "moecast", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        seen = ""
        while event not in seen:
            piece = process.stdout.read(1)
            assert piece, f"the command ended before {event!r}: {seen}"
            seen += piece
        os.killpg(process.pid, signal.SIGINT)
        rest = process.stdout.read()
        return process.wait(), (seen + rest).splitlines()


def test_interrupt__is_one_line_with_the_command_that_continues(tmp_path: Path) -> None:
    arguments = ["collect", "data.num_prompts=200", "data.max_new_tokens=16"]
    code, lines = interrupt(arguments, "prompts to record", tmp_path)
    assert code == 130
    # A recording continues from its own parts, so that the command needs no run folder.
    assert lines[-1] == f"interrupted; to continue: moecast {' '.join(arguments)}"
    assert not any("Traceback" in text or "Exception" in text for text in lines)
