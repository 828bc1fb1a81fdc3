"""Generation requests from valid bodies: defaults, limits and the model's properties."""

import json
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from runtime.errors import BudgetError, CheckpointError
from runtime.generation.chat_template import PLAIN_STOP, EndOfTurn, end_of_turn
from runtime.generation.detokenizer import Detokenizer
from runtime.generation.sampling import SamplingParams
from runtime.hf.kv import CacheSize, KVCacheBudget
from runtime.serving.answers.tool_template import ToolTemplate
from runtime.serving.api.generation_requests import parse_chat, parse_completion, tokenize_body
from runtime.serving.api.schemas import ChatRequest, CompletionRequest, TokenizeRequest
from runtime.serving.choice import CompletionChoice, FinishReason, TokenDelta
from runtime.serving.config import ServeConfig
from runtime.serving.errors import ContextTooLong, RequestError
from tests.builders.plain_answers import TOKENIZER
from tests.builders.plain_answers import model_info as info
from tests.builders.serving import tiny
from tests.builders.tokenizers import byte_fallback_tokenizer
from tests.unit.runtime.serving.test_answer_formats import CALLS, FAMILIES, TOOLS, format_of
from tests.unit.runtime.serving.test_completions import HELLO, user


def completion(**body: Any) -> CompletionRequest:
    return CompletionRequest.model_validate({"prompt": "The heart", **body})


def chat(**body: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": HELLO, **body})


def parsed(body: CompletionRequest | ChatRequest, **model: Any) -> Any:
    """The request to a model with these properties."""
    parse: Any = parse_chat if isinstance(body, ChatRequest) else parse_completion
    return parse(body, info(**model), ServeConfig(max_new_tokens=100))


def sampling_of(body: CompletionRequest | ChatRequest, **model: Any) -> SamplingParams:
    return parsed(body, **model).prompts[0].sampling


@pytest.mark.parametrize("body", [chat(n=2), completion(n=2)])
def test_answers_that_never_fit__are_refused(body: ChatRequest | CompletionRequest) -> None:
    parse: Any = parse_chat if isinstance(body, ChatRequest) else parse_completion
    with pytest.raises(RequestError, match="n=2: this server allows at most 1") as caught:
        parse(body, info(), ServeConfig(max_running=1, max_waiting=0))
    assert caught.value.param == "n"


def test_call_without_a_mark__is_one_of_an_offered_tool() -> None:
    form = format_of(FAMILIES["llama"].template)
    request = parsed(chat(tools=TOOLS), answer_format=form, tool_template=ToolTemplate())
    for text, calls in ((FAMILIES["llama"].text, CALLS[:1]), ('{"name": "Bob", "age": 3}', [])):
        delta = TokenDelta(text=text, token=1, offset=0, logprob=None)
        output = request.reader().read([delta, FinishReason.STOP])
        assert [(call.name, json.loads(call.arguments)) for call in output.calls] == calls
        assert output.text == ("" if calls else text)


def test_max_tokens__defaults_to_16_for_completions_only() -> None:
    assert sampling_of(completion()).max_new_tokens == 16
    assert sampling_of(completion(prompt=[1] * 195)).max_new_tokens == 5
    for length in (200, None):
        assert sampling_of(chat(), context_length=length).max_new_tokens == 100
    (short,) = parsed(chat(), context_length=20).prompts
    assert short.sampling.max_new_tokens == 20 - len(short.tokens)


def test_context_length__includes_prompt_and_answer() -> None:
    message = "prompt: this model's context length is 200 tokens, answer included, but .* has 200"
    with pytest.raises(ContextTooLong, match=message):
        parsed(completion(prompt=[1] * 200, max_tokens=6))
    parsed(completion(prompt=[1] * 200, max_tokens=0, echo=True))


def test_max_tokens__of_another_models_limit_is_what_fits() -> None:
    for length, num_prompt, expected in ((200, 195, 5), (200, 20, 100), (None, 20, 100)):
        body = completion(prompt=[1] * num_prompt, max_tokens=65535)
        assert sampling_of(body, context_length=length).max_new_tokens == expected
    for name in ("max_tokens", "max_completion_tokens"):
        assert sampling_of(chat(**{name: 65535})).max_new_tokens == 100


def test_kv_budget__bounds_prompt_and_answer_too() -> None:
    budget = KVCacheBudget(CacheSize(10, 0), 1000)
    assert info(kv_budget=budget).max_length == 100
    assert info(kv_budget=KVCacheBudget(CacheSize(10, 0), 9000)).max_length == 200
    fitting = completion(prompt=[1] * 95, max_tokens=6)
    assert sampling_of(fitting, kv_budget=budget).max_new_tokens == 5
    message = "kv_budget allows at most 100 tokens, answer included, but the prompt has 100"
    with pytest.raises(ContextTooLong, match=message):
        parsed(completion(prompt=[1] * 100), kv_budget=budget)
    (spoken,) = parsed(chat(), kv_budget=budget).prompts
    assert spoken.sampling.max_new_tokens == 100 - len(spoken.tokens)


def test_sampling__prefers_the_request_over_the_model() -> None:
    of_model = {"temperature": 0.7, "top_p": 0.8, "repetition_penalty": 1.05}
    sampling = sampling_of(completion(top_p=0.5), default_sampling=of_model)
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.7, 0.5, 0)
    assert sampling.repetition_penalty == 1.05
    sampling = sampling_of(completion(top_k=-1))
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, 0)
    assert sampling_of(completion(temperature=0), default_sampling=of_model).is_greedy


def test_chat__ends_at_the_end_of_its_turn_too() -> None:
    turn = EndOfTurn(token_ids=(7,), strings=(PLAIN_STOP,))
    sampling = sampling_of(chat(stop="\n"), end_of_turn=turn)
    assert (sampling.stop_token_ids, sampling.stop) == ({0, 7}, ("\n", PLAIN_STOP))
    assert sampling_of(completion(), end_of_turn=turn).stop_token_ids == {0}


def test_developer_role__becomes_system_in_templates() -> None:
    first = ({"role": role, "content": "x"} for role in ("developer", "system"))
    developer, system = (parsed(chat(messages=[message, *HELLO])) for message in first)
    assert developer.prompts[0].tokens == system.prompts[0].tokens


def test_seeds__are_consecutive_and_wrap() -> None:
    request = parsed(completion(seed=2**63 - 1, n=3))
    assert [request.sampling_params(0, number).seed for number in range(3)] == [2**63 - 1, 0, 1]
    assert len({parsed(completion()).sampling_params(0, 0).seed for _ in range(3)}) == 3


def test_echo__rejects_prompts_with_too_many_logits() -> None:
    body = completion(prompt=[1] * 100, max_tokens=0, echo=True, logprobs=1)
    parsed(body)
    with pytest.raises(ContextTooLong, match="logits of 100 tokens"):
        parsed(body, logit_bytes=1 << 24)
    parsed(completion(prompt=[1] * 100, echo=True), logit_bytes=1 << 24)


@pytest.mark.parametrize("content", ["{% for %}", "{{ missing() }}"])
def test_chat_template__that_is_invalid_prevents_the_start(folder, tmp_path, content):
    (tmp_path / "template").write_text(content)
    with pytest.raises(CheckpointError, match=r"chat_template=\S+ is not usable"):
        tiny(folder, chat_template=tmp_path / "template")


def test_many_prompts__are_counted_before_they_are_encoded() -> None:
    with pytest.raises(RequestError, match="100 answers in one request exceed"):
        parsed(completion(prompt=["a"] * 100), tokenizer=None)


def test_stop_token_ids__may_not_be_the_whole_vocabulary_with_min_tokens() -> None:
    body: dict[str, Any] = {"prompt": [1], "stop_token_ids": [*range(8)]}
    parsed(completion(**body), vocab_size=8)
    with pytest.raises(RequestError, match="whole vocabulary") as caught:
        parsed(completion(**body, min_tokens=2), vocab_size=8)
    assert caught.value.param == "stop_token_ids"


def test_logprobs__of_all_answers_together_are_bounded() -> None:
    long = info(context_length=None)
    limits = ServeConfig(max_new_tokens=4096)
    most = {"prompt": [[1] * 1024] * 6, "n": 4, "max_tokens": 16, "echo": True, "logprobs": 20}
    assert parse_completion(completion(**most), long, limits).num_logprobs == 24 * 1040 * 21
    with pytest.raises(RequestError, match=r"have 524664 log-prob.*at most 524288") as caught:
        parse_completion(completion(**most | {"max_tokens": 17}), long, limits)
    assert caught.value.param == "logprobs"
    # Without echo, or without log-probabilities, the prompts' tokens are not reported.
    for fewer in ({"echo": False}, {"logprobs": None}):
        parse_completion(completion(**most | fewer | {"max_tokens": 20}), long, limits)
    spoken = chat(logprobs=True, top_logprobs=20, n=4)
    parse_chat(spoken, long, limits)
    with pytest.raises(RequestError, match="688128 log-probabilities"):
        parse_chat(spoken, long, replace(limits, max_new_tokens=8192))


@pytest.mark.parametrize("template", ["template", None])
def test_texts_that_cannot_fit__are_refused_before_they_are_encoded(template: str | None) -> None:
    tokenizer = SimpleNamespace(chat_template=template)
    tokenizer.apply_chat_template = lambda messages, **_: messages[0]["content"]
    model: Any = {"tokenizer": tokenizer, "max_token_bytes": 3}
    long, refusal = "\u20ac" * 201, "bytes of text are more than 20[0-9] tokens"
    for body in (completion(prompt=[long]), chat(messages=user(long))):
        with pytest.raises(ContextTooLong, match=refusal):
            parsed(body, **model)
    for fields in ({"prompt": long}, {"messages": user(long)}):
        with pytest.raises(ContextTooLong, match=refusal):
            tokenize_body(TokenizeRequest.model_validate(fields), info(**model))


def test_texts_that_may_fit__are_encoded() -> None:
    body = TokenizeRequest.model_validate({"prompt": "a" * 600})
    for more in ({"max_token_bytes": 3}, {"max_token_bytes": None}, {"context_length": None}):
        assert tokenize_body(body, info(**more)) == TOKENIZER("a" * 600)["input_ids"]


def test_tokenizer_of_another_model__is_named_before_the_model_runs() -> None:
    with pytest.raises(RequestError, match="prompt: token .* not in the model's vocabulary of 10"):
        parsed(completion(), vocab_size=10)
    with pytest.raises(RequestError, match="messages: token .* not in the model's vocabulary"):
        parsed(chat(), vocab_size=10)


def test_chat_template__that_fails_in_any_way_is_a_refusal() -> None:
    for code in ("{{ 1 // 0 }}", "{{ messages + 1 }}", "{{ messages[0].content.x.y }}"):
        tokenizer = deepcopy(TOKENIZER)
        tokenizer.chat_template = code
        assert end_of_turn(tokenizer) == EndOfTurn()
        with pytest.raises(RequestError, match="^messages: .*template refuses these messages"):
            parsed(chat(), tokenizer=tokenizer)


def test_kv_budget__counts_fixed_and_growing_bytes() -> None:
    budget = KVCacheBudget(CacheSize(10, 100), 1000)
    assert (budget.max_length, budget.bytes_of([3, 4])) == (90, 270)
    fitting = [texts for texts in ([90], [91], [40, 40], [40, 41]) if budget.fits(texts)]
    assert fitting == [[90], [40, 40]]
    fixed = KVCacheBudget(CacheSize(0, 400), 1000)
    assert fixed.max_length is None
    assert [fixed.fits(texts) for texts in ([10**9] * 2, [1] * 3)] == [True, False]


INVALID = {"cannot be measured": CacheSize(0, 0), "two tokens takes 1005": CacheSize(10, 985)}


@pytest.mark.parametrize("message", INVALID)
def test_kv_budget__that_is_invalid_is_an_error(message: str) -> None:
    with pytest.raises(BudgetError, match=message):
        KVCacheBudget(INVALID[message], 1000)


def test_stop_string__in_bytes_that_are_still_held_ends_the_answer_at_once() -> None:
    events: list[Any] = []
    sampling = SamplingParams(max_new_tokens=20, stop=("b€",))
    choice = CompletionChoice([1], sampling, deliver=events.extend)
    choice._detokenizer = Detokenizer(byte_fallback_tokenizer())
    assert [choice.on_token(token) for token in "ab€".encode()] == [False] * 4 + [True]
    choice.complete()
    assert "".join(event.text for event in events[:-1]) == "a"
    assert events[-1] is FinishReason.STOP
