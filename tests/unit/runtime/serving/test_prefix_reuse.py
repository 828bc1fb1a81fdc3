"""Prompts that go on with an earlier answer's KV cache: what clients read, and what is kept."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from transformers import DynamicCache

from runtime.config import Exact, ModelConfig
from runtime.serving.config import ServeConfig
from runtime.serving.observe.status import Telemetry
from tests.builders.plain_answers import PlainAnswers, text_of
from tests.builders.serving import RunningServer, running_server, tiny
from tests.builders.waiting import wait_for
from tests.unit.runtime.serving.test_completions import COMPLETIONS, raw
from tests.unit.runtime.serving.test_metrics import of

PROMPT = list(range(100, 140))
QUESTIONS = [[7, 8, 9], [50, 51], list(range(60, 80)), [300]]


def complete(server: RunningServer, prompt: list[int], **options: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True, **options}
    return raw(server, COMPLETIONS, **body)


def count_cached(answer: dict[str, Any]) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


class Conversation:
    """Turns of plain Transformers, which keep one `past_key_values`."""

    def __init__(self, plain: PlainAnswers):
        self._plain, self._past = plain, DynamicCache(config=plain.model.config)
        self.tokens: list[int] = list(PROMPT)

    def answer(self, number: int = 6) -> str:
        new = self._plain.tokens(self.tokens, number, past_key_values=self._past)
        self.tokens += new
        return text_of(new)


@pytest.mark.parametrize("exact", [Exact.EAGER, Exact.SHARED])
def test_conversation__computes_each_turn_once(folder, plain, exact):
    model = ModelConfig(name="tiny", id=str(folder), exact=exact)
    with running_server(lambda: tiny(folder, model=model)) as server:
        turns = Conversation(plain)
        for number, question in enumerate([[], *QUESTIONS]):
            before = len(turns.tokens)
            turns.tokens += question
            answer = complete(server, turns.tokens)
            assert count_cached(answer) == (before - 1 if number else 0)
            assert answer["usage"]["prompt_tokens"] == len(turns.tokens)
            assert answer["choices"][0]["text"] == turns.answer()
        assert server.service.wait_idle(60)
        assert server.service.loaded.kept.num_texts == 1
        # What needs the logits of all tokens computes all of them.
        assert count_cached(complete(server, turns.tokens, echo=True, logprobs=1)) == 0


def test_cancelled_answer__is_gone_on_with(folder: Path, plain: PlainAnswers) -> None:
    with running_server(lambda: tiny(folder)) as server:
        server.steps.hold()
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(complete, server, PROMPT, max_tokens=50)
            for _ in range(3):
                server.steps.allowed.release()
            wait_for(lambda: server.steps.num_steps >= 4)
            server.service.cancel(list(server.service._running))
            server.steps.release()
            waiting.result()
        turns = Conversation(plain)
        turns.answer(4)
        turns.tokens += QUESTIONS[0]
        answer = complete(server, turns.tokens)
        assert count_cached(answer) == len(PROMPT) + 3
        assert answer["choices"][0]["text"] == turns.answer()


@pytest.mark.parametrize("num_clients", [1, 4])
def test_kv_budget__holds_running_and_kept_texts(folder: Path, num_clients: int) -> None:
    """Kept texts make room for running ones, the one that was used longest ago first."""
    with running_server(lambda: tiny(folder, kv_budget="16KiB")) as server:
        loaded = server.service.loaded
        size = loaded.info.kv_budget.size.bytes_per_token
        assert 16 * 1024 // size == 128  # tokens
        held: list[int] = []

        def count(choices):
            running = loaded.info.kv_budget.bytes_of(one.max_cached_tokens for one in choices)
            held.append(loaded.kept.num_bytes + running)

        server.steps.after_step = count
        prompts = [[200 + number, *PROMPT] for number in range(4)]
        with ThreadPoolExecutor(num_clients) as pool:
            for _ in range(2):
                list(pool.map(lambda prompt: complete(server, prompt), prompts))
        assert server.service.wait_idle(60)
        assert 0 < max(held) <= 16 * 1024
        assert (loaded.kept.num_texts, loaded.kept.num_bytes) == (2, 2 * (len(PROMPT) + 6) * size)
        # The longest answer leaves no room, and what is kept did not make it wait.
        complete(server, PROMPT[:5], max_tokens=123)
        assert server.service.wait_idle(60)
        assert loaded.kept.num_texts == 1
        assert count_cached(complete(server, prompts[-1])) == 0


def test_option__turns_it_off(folder: Path) -> None:
    with running_server(lambda: tiny(folder, prefix_cache=False)) as server:
        for _ in range(2):
            assert count_cached(complete(server, PROMPT)) == 0


def test_metrics_and_status__count_reused_tokens(folder: Path) -> None:
    made, config = list[Telemetry](), ServeConfig(model=ModelConfig(name="m"))
    watch = {"install": lambda service: made.append(Telemetry(service, config))}
    with running_server(lambda: tiny(folder), **watch) as server:
        complete(server, PROMPT)
        complete(server, PROMPT + QUESTIONS[0])
        assert server.service.wait_idle(60)
        status, metrics = made[0].status(), made[0].metrics
        counts = status["tokens"]
        assert (counts["prompt"], counts["reused"]) == (2 * len(PROMPT) + 3, len(PROMPT))
        assert status["memory"]["kept_kv_bytes"] == server.service.loaded.kept.num_bytes > 0
        assert of(metrics, "vllm:prefix_cache_queries_total") == 2 * len(PROMPT) + 3
        assert of(metrics, "vllm:prefix_cache_hits_total") == len(PROMPT)
