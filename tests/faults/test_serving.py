"""A server whose disk fails while it answers several clients."""

from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from benchmarks.serving.server import IDLE_GAUGES, ServerProcess
from tests.builders.faults.rules import Rule
from tests.builders.forked import run_server
from tests.builders.plain_answers import PlainAnswers
from tests.builders.serving import speaking_model
from tests.faults.conftest import mount_faulty_disk

pytestmark = pytest.mark.faults
PROMPTS = ("The heart pumps blood", "It was late", "Return a new list", "She said", "x = 1", "And")
NEW_TOKENS = 12


@pytest.fixture
def disk(tmp_path):
    source = speaking_model(tmp_path / "source", num_experts=16)
    with mount_faulty_disk(source, tmp_path / "faulty") as mounted:
        yield mounted


def ask_all(running: ServerProcess) -> list[httpx2.Response]:
    def ask(prompt: str) -> httpx2.Response:
        body = {"prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
        return httpx2.post(f"{running.api}/completions", json=body, timeout=240)

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(ask, PROMPTS))


def texts(answers: list[httpx2.Response]) -> list[str]:
    assert [answer.status_code for answer in answers] == [200] * len(answers)
    return [answer.json()["choices"][0]["text"] for answer in answers]


def test_server__gives_equal_answers_before_and_after_read_errors(disk):
    answers = PlainAnswers(disk.mount)
    plain = [answers.text(prompt, NEW_TOKENS, eos_token_id=None) for prompt in PROMPTS]
    with run_server({"model.id": disk.mount, "budget": "20%", "predictor": "skip"}) as running:
        assert texts(ask_all(running)) == plain
        # Some reads fail, of prefetches and on demand: they are retried, and no client notices.
        disk.fails(Rule("eio", times=3))
        assert texts(ask_all(running)) == plain
        assert disk.num_faults() == 3
        # All reads fail: requests get an error, and the server stays alive.
        disk.fails(Rule("eio"))
        answers = ask_all(running)
        assert {answer.status_code for answer in answers} <= {200, 500}
        codes = {a.json()["error"]["code"] for a in answers if a.status_code == 500}
        assert codes == {"expert_transfer_failed"}
        assert httpx2.get(f"{running.url}/health").status_code == 200
        assert running.metrics()["moecast_io_errors_total"] > 0
        disk.is_well()
        assert texts(ask_all(running)) == plain
        running.wait_idle()
        assert running.idle_gauges() == dict.fromkeys(IDLE_GAUGES, 0.0)
        assert running.stop().exit_code == 0
