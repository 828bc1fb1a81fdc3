"""The documentation's own commands: read from its pages, run as a reader would run them."""

import random
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

import httpx2

from moecast.command import main
from tests.builders.waiting import wait_for
from tests.docs.pages import ROOT, read_blocks

START_SECONDS = 240.0


def read_commands(page: str) -> list[str]:
    """Reads the lines of a page's console blocks, by its path in the repository."""
    blocks = read_blocks(ROOT / page, "console")
    return [line for block in blocks for line in block.text.splitlines()]


def read_python(page: str) -> list[str]:
    """Reads a page's blocks of Python."""
    return [block.text for block in read_blocks(ROOT / page, "python")]


def replace_words(line: str, words: Mapping[str, str]) -> str:
    for word, replacement in words.items():
        line = line.replace(word, replacement)
    return line


def add_options(line: str, options: Mapping[str, str]) -> str:
    """Adds to a command what there is for its first two words."""
    return f"{line} {options.get(' '.join(line.split()[:2]), '')}".strip()


def run_command(line: str) -> None:
    """Runs `moecast ...` in this process, whose imports are done; fails unless it succeeds."""
    program, *arguments = shlex.split(line)
    assert program == "moecast", line
    assert main(arguments) == 0, line


@contextmanager
def serve_in_background(line: str, *, port: int) -> Iterator[None]:
    """Runs `moecast serve ...` as a separate process, from when it listens to the end."""
    command, url = [sys.executable, "-m", *shlex.split(line)], f"http://127.0.0.1:{port}"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:

        def is_ready() -> bool:
            assert process.poll() is None, "the server ended"
            with suppress(httpx2.TransportError):
                # Without certificates, which take a tenth of a second to load.
                return httpx2.get(f"{url}/ready", verify=False).status_code == 200
            return False

        try:
            wait_for(is_ready, "the server is ready", seconds=START_SECONDS, pause=0.1)
            yield
        finally:
            process.terminate()
            _, output = process.communicate(timeout=START_SECONDS)
        assert process.returncode == 0, output.decode()


def run_curl(line: str) -> dict[str, object]:
    """Sends the request of a `curl URL -H HEADER -d BODY` line; returns the JSON answer."""
    program, url, *options = shlex.split(line)
    assert program == "curl", line
    values = dict(zip(options[::2], options[1::2], strict=True))
    assert values.keys() == {"-H", "-d"}, line
    name, _, value = values["-H"].partition(": ")
    answer = httpx2.post(f"http://{url}", headers={name: value}, content=values["-d"], timeout=60)
    answer.raise_for_status()
    return answer.json()


def free_port() -> int:
    """Returns a port that nothing listens on now.

    Below 32768, where Linux takes the ports of clients from: none of them gets it meanwhile.
    """
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
