"""Ctrl-C, sent to the whole process group as a terminal does, ends a command with one line."""

import os
import re
import signal
import subprocess
import sys
from itertools import takewhile

from tests.builders.processes import ROOT


def test_interrupt__is_one_line_with_the_command_that_continues(tmp_path) -> None:
    command = ["moecast", "collect", "data.num_prompts=200", "data.max_new_tokens=16"]
    options = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": str(ROOT)}}
    options |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    program = [sys.executable, "-u", "-m", *command]
    with subprocess.Popen(program, start_new_session=True, **options) as process:
        said = [*takewhile(lambda line: "prompts to record" not in line, process.stdout)]
        os.killpg(process.pid, signal.SIGINT)
        said += process.stdout
    assert process.returncode == 130, said
    # A recording continues from its own parts, so that the command needs no run folder.
    assert said[-1] == f"interrupted; to continue: {' '.join(command)}\n"
    assert not re.search("Traceback|Exception", "".join(said))
