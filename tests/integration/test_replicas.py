"""`serve launcher=ray`: two replicas are used, filled and ended."""

import contextlib
import json
import shutil
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import httpx2
import psutil
import pytest

from benchmarks.process import start_process
from runtime.config import ModelConfig
from runtime.store.model_source import resolve
from tests.builders.pages import free_port
from tests.builders.waiting import wait_for
from tests.docs.tested_commands import read_block

pytestmark = [
    *(pytest.mark.engines, pytest.mark.timeout(900)),
    # Not imported: other tests need Ray in this process to start with a token.
    pytest.mark.skipif(find_spec("ray") is None, reason="the `ray` extra is not installed"),
]

UP_SECONDS = 420


class Server:
    def __init__(self, tmp_path):
        port, self.log = free_port(), tmp_path / "log"
        self.url = f"http://127.0.0.1:{port}/v1/completions"
        (documented,) = read_block("distributed.md", "replicas")
        self.model = tmp_path / "qwen2-moe-tiny"
        shutil.copytree(resolve(ModelConfig()), self.model)
        here = {"port=8000": f"port={port}", "moecast ": f"{sys.executable} -m moecast "}
        command = documented.adapt(here).split()
        command += [f"model={self.model}", f"run_dir={tmp_path / 'run'}"]
        command += ["max_running=2", "max_waiting=8", "grace=20"]
        self.process = start_process(command, self.log)

    def wait_to_say(self, text: str) -> None:
        def has_said() -> bool:
            said = self.log.read_text()
            assert text in said or self.process.poll() is None, said[-3000:]
            return text in said

        wait_for(has_said, text, seconds=UP_SECONDS, pause=0.3)

    def ask(self, prompt: str, **options: object) -> httpx2.Response:
        body = {"model": "qwen2-moe-tiny", "prompt": prompt, "max_tokens": 6, "temperature": 0}
        body |= {"ignore_eos": True, **options}
        # Without certificates, which take a tenth of a second to load.
        return httpx2.post(self.url, json=body, timeout=240, verify=False)

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def replicas(self) -> set[int]:
        """Returns the ids of their processes."""
        found = set()
        for process in self.family():
            with contextlib.suppress(psutil.NoSuchProcess):  # the process has ended
                if "ServeReplica:moecast:server" in " ".join(process.cmdline()):
                    found.add(process.pid)
        return found

    def end(self) -> None:
        family = self.family() if self.process.poll() is None else []
        self.process.kill()
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    made = Server(tmp_path_factory.mktemp("replicas"))
    try:
        made.wait_to_say("(2 replicas)")
        yield made
    finally:
        made.end()


def listened_at(processes) -> set[str]:
    addresses = set()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            connections = process.net_connections("inet")
            addresses |= {one.laddr.ip for one in connections if one.status == "LISTEN"}
    return addresses


def test_replicas__give_equal_answers_and_listen_on_loopback_only(server):
    answers = [server.ask("The heart pumps blood").json() for _ in range(4)]
    (text,) = {answer["choices"][0]["text"] for answer in answers}
    assert text
    assert len(server.replicas()) == 2
    assert listened_at(server.family()) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    rejection = server.ask("")
    assert (rejection.status_code, "error" in rejection.json()) == (400, True)


def test_replicas__stream_as_one_server_does(server):
    answer = server.ask("It was", max_tokens=4, stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in answer.text.splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    assert len(lines) > 2


def test_replicas__answer_429_when_their_queues_are_full(server):
    """Two replicas hold 10 requests each; of 40 that come at once, the others get 429."""

    def client(_: int) -> tuple[int, bool]:
        answer = server.ask("Once upon a time", max_tokens=40)
        return answer.status_code, "retry-after" in answer.headers

    with ThreadPoolExecutor(40) as pool:
        assert set(pool.map(client, range(40))) == {(200, False), (429, True)}


def test_update_that_fails__says_why_and_leaves_the_replicas(server):
    tokenizer = server.model / "tokenizer.json"
    tokenizer.rename(server.model / "aside")
    server.process.send_signal(signal.SIGHUP)
    server.wait_to_say("the update failed, and the replicas before it go on (")
    assert "its tokenizer cannot be read" in server.log.read_text()
    assert server.ask("The heart pumps blood").status_code == 200


def test_replicas__end_on_sigterm(server):
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(timeout=90) == 0
    report = json.loads((server.log.parent / "run/results.json").read_text())
    assert report["ended"] == "SIGTERM"
