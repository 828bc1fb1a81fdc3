"""What a request that is well-formed asks the engine for, given the model's facts."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from runtime.config import BUILTIN_MODELS
from runtime.errors import CheckpointError
from runtime.generation.chat_template import PLAIN_STOP, EndOfTurn, end_of_turn
from runtime.hf.kv import CacheSize
from runtime.serving.caches import CacheBudget
from runtime.serving.errors import ContextTooLong, RequestError
from runtime.serving.facts import Facts
from runtime.serving.orders import Limits, chat_order, completion_order
from runtime.serving.schemas import ChatRequest, CompletionRequest
from tests.builders.serving import tiny

TOKENIZER = AutoTokenizer.from_pretrained(BUILTIN_MODELS / "qwen2_moe_tiny")
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
LIMITS = Limits(max_new_tokens=100)


def facts(**more: Any) -> Facts:
    known: dict[str, Any] = {
        "name": "m",
        "aliases": frozenset({"alias"}),
        "tokenizer": TOKENIZER,
        "vocab_size": 8192,
        "context": 200,
        "logit_bytes": 16384,
        "end_ids": frozenset({0}),
        "end_of_turn": end_of_turn(TOKENIZER),
    }
    return Facts(**{**known, **more})


def completion(**body: Any) -> CompletionRequest:
    return CompletionRequest.model_validate({"prompt": "The heart", **body})


def test_number_of_tokens__is_16_for_a_text_and_what_there_is_room_for_in_a_chat() -> None:
    assert completion_order(completion(), facts(), LIMITS).samplings[0].max_new_tokens == 16
    order = completion_order(completion(prompt=[1] * 195), facts(), LIMITS)
    assert order.samplings[0].max_new_tokens == 5
    chat = ChatRequest.model_validate({"messages": HELLO})
    assert chat_order(chat, facts(), LIMITS).samplings[0].max_new_tokens == 100
    short = chat_order(chat, facts(context=20), LIMITS)
    assert short.samplings[0].max_new_tokens == 20 - len(short.prompts[0].tokens)
    assert chat_order(chat, facts(context=None), LIMITS).samplings[0].max_new_tokens == 100


@pytest.mark.parametrize("num_tokens", [5, 6])
def test_context__is_prompt_and_answer_together(num_tokens: int) -> None:
    request = completion(prompt=[1] * 195, max_tokens=num_tokens)
    if num_tokens == 5:
        completion_order(request, facts(), LIMITS)
    else:
        with pytest.raises(ContextTooLong, match="200 tokens; the prompt has 195 and 6 are"):
            completion_order(request, facts(), LIMITS)


def test_room_of_caches__bounds_prompt_and_answer_too() -> None:
    bounded = facts(caches=CacheBudget(CacheSize(10, 0), 1000))
    assert bounded.longest == 100
    assert facts(caches=CacheBudget(CacheSize(10, 0), 9000)).longest == 200
    completion_order(completion(prompt=[1] * 95, max_tokens=5), bounded, LIMITS)
    with pytest.raises(ContextTooLong, match=r"\(kv_budget\) for 100 tokens; the prompt has 95"):
        completion_order(completion(prompt=[1] * 95, max_tokens=6), bounded, LIMITS)
    chat = chat_order(ChatRequest.model_validate({"messages": HELLO}), bounded, LIMITS)
    assert chat.samplings[0].max_new_tokens == 100 - len(chat.prompts[0].tokens)


def test_sampling__is_the_requests_then_the_makers_then_openais() -> None:
    model = facts(recommended={"temperature": 0.7, "top_p": 0.8, "repetition_penalty": 1.05})
    found = completion_order(completion(top_p=0.5), model, LIMITS).samplings[0]
    assert (found.temperature, found.top_p, found.top_k) == (0.7, 0.5, 0)
    assert found.repetition_penalty == 1.05
    found = completion_order(completion(top_k=-1), facts(), LIMITS).samplings[0]
    assert (found.temperature, found.top_p, found.top_k) == (1.0, 1.0, 0)
    greedy = completion_order(completion(temperature=0), model, LIMITS).samplings[0]
    assert greedy.is_greedy


def test_chat__ends_at_the_end_of_its_turn_too() -> None:
    chat = ChatRequest.model_validate({"messages": HELLO, "stop": "\n"})
    turn = EndOfTurn(token_ids=(7,), strings=(PLAIN_STOP,))
    found = chat_order(chat, facts(end_of_turn=turn), LIMITS).samplings[0]
    assert found.stop_token_ids == {0, 7}
    assert found.stop == ("\n", PLAIN_STOP)
    text = completion_order(completion(), facts(end_of_turn=turn), LIMITS).samplings[0]
    assert text.stop_token_ids == {0}


def test_developer__is_the_system_to_templates() -> None:
    orders = [
        chat_order(
            ChatRequest.model_validate({"messages": [{"role": role, "content": "x"}, *HELLO]}),
            facts(),
            LIMITS,
        )
        for role in ("developer", "system")
    ]
    assert orders[0].prompts == orders[1].prompts


def test_seeds__follow_one_another_and_wrap() -> None:
    order = completion_order(completion(seed=2**63 - 1, n=3), facts(), LIMITS)
    assert [order.sampling(0, choice).seed for choice in range(3)] == [2**63 - 1, 0, 1]
    drawn = {completion_order(completion(), facts(), LIMITS).seed for _ in range(3)}
    assert len(drawn) == 3


def test_logits_of_a_long_prompt__are_not_all_kept() -> None:
    request = completion(prompt=[1] * 100, max_tokens=0, echo=True, logprobs=1)
    completion_order(request, facts(), LIMITS)
    with pytest.raises(ContextTooLong, match="logits of 100 tokens"):
        completion_order(request, facts(logit_bytes=1 << 24), LIMITS)
    completion_order(completion(prompt=[1] * 100, echo=True), facts(logit_bytes=1 << 24), LIMITS)


def test_names__are_the_short_one_and_aliases() -> None:
    for name in (None, "m", "alias"):
        completion_order(completion(model=name), facts(), LIMITS)
    with pytest.raises(RequestError, match="'other' is not served here; 'm' is"):
        completion_order(completion(model="other"), facts(), LIMITS)


@pytest.fixture
def template(tmp_path: Path) -> Path:
    path = tmp_path / "template.jinja"
    path.write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}")
    return path


def test_chat_template__may_come_from_a_file(folder: Path, template: Path) -> None:
    served = tiny(folder, chat_template=template)
    with served.model.moecast:
        chat = ChatRequest.model_validate({"messages": HELLO})
        tokens = chat_order(chat, served.facts, LIMITS).prompts[0].tokens
        assert TOKENIZER.decode(tokens) == "[user] hello\n"


@pytest.mark.parametrize("content", ["{% for %}", "{{ missing() }}", None])
def test_chat_template__that_is_none_ends_the_start(
    folder: Path, template: Path, content: str | None
) -> None:
    if content is None:
        template.unlink()
    else:
        template.write_text(content)
    with pytest.raises(CheckpointError, match="chat template can not be"):
        tiny(folder, chat_template=template)
