"""`serve launcher=ray`: two replicas are used, filled, replaced, killed, ended."""

import contextlib
import http.client
import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.builders.pages import free_port
from tests.builders.server_load import asking
from tests.docs.tested_commands import read_block

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(900),
    # Not imported: other tests need Ray in this process to start with a token.
    pytest.mark.skipif(find_spec("ray") is None, reason="the `ray` extra is not installed"),
]

ROOT = Path(__file__).resolve().parents[2]
UP_SECONDS = 420


class Server:
    def __init__(self, tmp_path: Path):
        self.port, self.log = free_port(), tmp_path / "log"
        self._out = self.log.open("w")
        (documented,) = read_block("distributed.md", "replicas")
        here = {"port=8000": f"port={self.port}", "moecast ": f"{sys.executable} -m moecast "}
        command = documented.adapt(here)
        self.process = subprocess.Popen(
            [*command.split(), "max_running=2", "max_waiting=8", "grace=20",
             f"run_dir={tmp_path / 'run'}"],
            cwd=ROOT,
            stdout=self._out,
            stderr=subprocess.STDOUT,
        )  # fmt: skip

    def wait_for(self, text: str, seconds: float = UP_SECONDS) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if text in self.log.read_text():
                return
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            time.sleep(0.3)
        raise AssertionError(f"{text!r} is not in the log: {self.log.read_text()[-3000:]}")

    def complete(self, prompt: str, max_tokens: int = 6, timeout: float = 240) -> str:
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        with self.ask(body, timeout) as answer:
            return json.load(answer)["choices"][0]["text"]

    def ask(self, body: dict[str, Any], timeout: float) -> http.client.HTTPResponse:
        content = json.dumps({"model": "qwen2-moe-tiny", **body}).encode()
        url = f"http://127.0.0.1:{self.port}/v1/completions"
        request = urllib.request.Request(url, content, {"content-type": "application/json"})
        return urllib.request.urlopen(request, timeout=timeout)

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def engines(self) -> list[psutil.Process]:
        replicas = []
        for process in self.family():
            with contextlib.suppress(psutil.NoSuchProcess):  # the process has ended
                if "ServeReplica:moecast:server" in " ".join(process.cmdline()):
                    replicas.append(process)
        return replicas

    def end(self) -> None:
        family = self.family() if self.process.poll() is None else []
        self.process.kill()
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._out.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    made = Server(tmp_path_factory.mktemp("replicas"))
    try:
        made.wait_for("(2 replicas)")
        yield made
    finally:
        made.end()


def listened_at(processes) -> set[str]:
    addresses = set()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            addresses |= {
                c.laddr.ip for c in process.net_connections("inet") if c.status == "LISTEN"
            }
    return addresses


def test_replicas__give_equal_answers_and_listen_on_loopback_only(server):
    answers = {server.complete("The heart pumps blood") for _ in range(4)}
    assert len(answers) == 1
    assert answers.pop()
    assert len(server.engines()) == 2
    assert listened_at(server.family()) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    with pytest.raises(urllib.error.HTTPError) as rejection:
        server.complete("")
    assert rejection.value.code == 400
    assert "error" in json.load(rejection.value)


def test_replicas__stream_as_one_server_does(server):
    with server.ask({"prompt": "It was", "max_tokens": 4, "stream": True}, 60) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.read().decode().splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    assert len(lines) > 2


def test_replicas__answer_429_when_their_queues_are_full(server):
    """Two replicas hold 10 requests each; of 40 that come at once, the others get 429."""

    def client(_: int) -> tuple[int, bool]:
        try:
            server.complete("Once upon a time", max_tokens=40)
        except urllib.error.HTTPError as error:
            return error.code, "retry-after" in error.headers
        return 200, False

    with ThreadPoolExecutor(40) as pool:
        assert set(pool.map(client, range(40))) == {(200, False), (429, True)}


def test_replicas__are_replaced_without_rejected_requests(server):
    served = []
    before = {process.pid for process in server.engines()}
    with asking(3, lambda: served.append(server.complete("Number 1 is"))):
        server.process.send_signal(signal.SIGHUP)
        server.wait_for("replaced")
        time.sleep(2)
    assert len(served) > 3
    after = {process.pid for process in server.engines()}
    assert len(after) >= 2
    assert not after & before


def test_replicas__end_on_sigterm(server):
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(timeout=90) == 0
    report = json.loads((server.log.parent / "run/results.json").read_text())
    assert report["ended"] == "SIGTERM"
    assert report["updates"] == 1
