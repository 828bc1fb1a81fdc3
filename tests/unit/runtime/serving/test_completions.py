"""Answers equal the model's own generation, in shapes that OpenAI's client validates strictly."""

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from runtime.generation.detokenizer import Vocabulary
from runtime.serving.api import event_stream, routes
from tests.builders.forced_text import END
from tests.builders.plain_answers import TOKENIZER, PlainAnswers, ids, text_of
from tests.builders.serving import PROMPTS, RunningServer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def user(content: Any, **fields: Any) -> list[dict[str, Any]]:
    """The messages of a chat that has one."""
    return [{"role": "user", "content": content, **fields}]


HELLO: list[Any] = user("hello")
ASKED: dict[str, dict[str, Any]] = {COMPLETIONS: {"prompt": PROMPTS[0]}, CHAT: {"messages": HELLO}}


def raw(server: RunningServer, path: str, **body: Any) -> dict[str, Any]:
    """The answer; a chat's has OpenAI's shape."""
    answer = server.post(path, json=body)
    assert answer.status_code == 200, answer.text
    if path == CHAT:
        ChatCompletion.model_validate(answer.json(), strict=True)
    return answer.json()


def events(server: RunningServer, path: str, **body: Any) -> list[Any]:
    """The parsed events of a stream, which ends with [DONE]; a chat's have OpenAI's shape."""
    answer = server.post(path, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    lines = [line for line in answer.text.split("\n\n") if line and not line.startswith(":")]
    assert lines[-1] == "data: [DONE]"
    found = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    for event in found if path == CHAT else ():
        ChatCompletionChunk.model_validate(event, strict=True)
    return found


def end_of(answer: dict[str, Any]) -> tuple[str, int]:
    """Reason of the first choice's end, and number of all tokens."""
    return answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]


def test_models__have_openais_shape(server: RunningServer) -> None:
    card = server.get("/v1/models/tiny").json()
    assert server.get("/v1/models").json() == {"object": "list", "data": [card]}
    Model.model_validate(card, strict=True)
    assert (card["id"], card["owned_by"], card["max_model_len"]) == ("tiny", "moecast", 2048)


def test_chat__answer_ends_with_its_turn(server: RunningServer, plain: PlainAnswers) -> None:
    prompt = TOKENIZER.apply_chat_template(HELLO, add_generation_prompt=True)["input_ids"]
    answer = raw(server, CHAT, messages=HELLO, max_tokens=12, temperature=0)
    tokens = plain.tokens(prompt, 12, eos_token_id=[0, END])
    message, usage = answer["choices"][0]["message"], answer["usage"]
    assert (message["role"], message["content"]) == ("assistant", text_of(tokens))
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(prompt), len(tokens))


def test_chat__accepts_its_own_answers_and_text_parts(server: RunningServer) -> None:
    first = server.openai().chat.completions.create(model="tiny", messages=HELLO, max_tokens=3)
    message = first.choices[0].message
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    spoken = [*HELLO, message.model_dump(), *user(parts)]
    history = [*HELLO, {"role": "assistant", "content": message.content}, *user("one two")]
    encoded = TOKENIZER.apply_chat_template(history, add_generation_prompt=True)
    assert raw(server, "/tokenize", messages=spoken)["tokens"] == encoded["input_ids"]


@pytest.mark.parametrize("path", ASKED)
def test_stream__has_the_whole_answers_usage_if_asked(server: RunningServer, path: str) -> None:
    body = ASKED[path] | {"max_tokens": 12, "temperature": 0}
    chunks = events(server, path, **body, stream_options={"include_usage": True})
    *parts, last = chunks
    assert (last["choices"], last["usage"]) == ([], raw(server, path, **body)["usage"])
    assert all(part["usage"] is None for part in parts)
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    assert len(parts) > 5
    if path == CHAT:
        first, *others = [part["choices"][0]["delta"] for part in parts]
        assert first["role"] == "assistant"
        assert all("role" not in delta for delta in others)
    assert all("usage" not in chunk for chunk in events(server, path, **body))


def test_stream__never_cuts_a_character(server: RunningServer) -> None:
    """A stream of the three bytes of one character."""
    vocabulary = Vocabulary(TOKENIZER)
    bytes_of = {tuple(vocabulary.bytes(token)): token for token in range(256)}
    body: dict[str, Any] = {"prompt": "a", "max_tokens": 150, "temperature": 2, "seed": 3}
    body["logit_bias"] = {str(bytes_of[byte,]): 100 for byte in "€".encode()}
    whole = raw(server, COMPLETIONS, **body)["choices"][0]["text"]
    texts = [chunk["choices"][0]["text"] for chunk in events(server, COMPLETIONS, **body)]
    assert "".join(texts) == whole
    assert "€" in whole
    *complete, _held, end = texts
    assert "".join(complete).count("\ufffd") == whole.rstrip("\ufffd").count("\ufffd")
    assert end == ""


def test_several_prompts_and_answers__come_in_order(server, plain):
    prompts = PROMPTS[:3]
    body = {"prompt": prompts, "n": 2, "max_tokens": 6, "temperature": 0}
    answer = raw(server, COMPLETIONS, **body)
    Completion.model_validate(answer, strict=True)
    expected = [plain.text(prompt, 6) for prompt in prompts for _ in range(2)]
    found = [(choice["index"], choice["text"]) for choice in answer["choices"]]
    assert found == list(enumerate(expected))
    usage, num_prompt = answer["usage"], sum(len(ids(prompt)) for prompt in prompts)
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (num_prompt, 36)
    assert usage["total_tokens"] == num_prompt + 36
    for echo in (False, True):
        texts = dict.fromkeys(range(6), "")
        for chunk in events(server, COMPLETIONS, **body, echo=echo):
            texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
        assert list(texts.values()) == [echo * prompts[i // 2] + expected[i] for i in range(6)]


def test_stop_token__ends_the_text_and_is_excluded(server, plain):
    tokens = plain.tokens(ids(PROMPTS[0]), 30)
    body = {"max_tokens": 30, "temperature": 0, "stop_token_ids": [tokens[7]]}
    answer = raw(server, COMPLETIONS, prompt=PROMPTS[0], **body)
    index = tokens.index(tokens[7])
    assert answer["choices"][0]["text"] == text_of(tokens[:index])
    assert end_of(answer) == ("stop", index + 1)


EOS_ENDS: list[tuple[dict[str, Any], tuple[str, int]]] = [
    ({}, ("stop", 1)),
    ({"ignore_eos": True}, ("length", 4)),
    ({"ignore_eos": True, "stop": "<|endoftext|>"}, ("stop", 1)),
    ({"min_tokens": 3}, ("stop", 4)),
]


@pytest.mark.parametrize(("more", "end"), EOS_ENDS)
def test_eos_token__ends_the_text_unless_ignored(server, more, end):
    body = {"prompt": PROMPTS[0], "max_tokens": 4, "temperature": 0, "logit_bias": {"0": 100}}
    assert end_of(raw(server, COMPLETIONS, **body, **more)) == end


def test_logprobs__equal_the_models(server: RunningServer, plain: PlainAnswers) -> None:
    body = {"prompt": PROMPTS[0], "max_tokens": 6, "temperature": 0.5, "seed": 2, "logprobs": 3}
    answer = raw(server, COMPLETIONS, **body, frequency_penalty=1)
    Completion.model_validate(answer, strict=True)
    logprobs = answer["choices"][0]["logprobs"]
    assert "".join(logprobs["tokens"]) == answer["choices"][0]["text"]
    tokens = ids(PROMPTS[0]) + ids(answer["choices"][0]["text"])
    rows = plain.logprobs_TV(tokens)
    start = len(ids(PROMPTS[0]))
    assert len(tokens) == start + 6, "the text has another tokenization than the generated one"
    expected = [float(rows[index - 1, tokens[index]]) for index in range(start, len(tokens))]
    assert logprobs["token_logprobs"] == pytest.approx(expected, abs=1e-4)
    for index, top in enumerate(logprobs["top_logprobs"]):
        row = rows[start + index - 1]
        likely = {*row.topk(3).indices.tolist(), tokens[start + index]}
        assert sorted(top.values()) == pytest.approx(sorted(row[list(likely)].tolist()), abs=1e-4)
    assert logprobs["text_offset"][0] == 0
    for offset, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True):
        assert answer["choices"][0]["text"][offset:].startswith(token)


@pytest.mark.parametrize("num_tokens", [0, 1])
@pytest.mark.parametrize("as_tokens", [False, True])
def test_echo_with_logprobs__scores_the_prompt(server, plain, num_tokens, as_tokens):
    """The requests that lm-evaluation-harness sends."""
    prompts = PROMPTS[:2] + [PROMPTS[5]]
    prompt: Any = [ids(prompt) for prompt in prompts] if as_tokens else prompts
    body = {"max_tokens": num_tokens, "temperature": 0, "logprobs": 1, "echo": True, "seed": 1234}
    answer = raw(server, COMPLETIONS, prompt=prompt, **body)
    for prompt, choice in zip(prompts, answer["choices"], strict=True):
        tokens, logprobs = ids(prompt), choice["logprobs"]
        rows, length = plain.logprobs_TV(tokens), len(tokens)
        assert len(logprobs["tokens"]) == length + num_tokens
        expected = [float(rows[index, token]) for index, token in enumerate(tokens[1:])]
        assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
        assert logprobs["token_logprobs"][1:length] == expected
        best = rows.max(-1).values.tolist()
        assert [max(top.values()) for top in logprobs["top_logprobs"][1:length]] == best[:-1]
        assert "".join(logprobs["tokens"]) == choice["text"]
        new = plain.tokens(tokens, num_tokens) if num_tokens else []
        assert choice["text"] == prompt + text_of(new)
        assert logprobs["text_offset"][length:] == [len(prompt)] * num_tokens


def test_echo_with_logprobs__reads_the_prompt_once(server, monkeypatch):
    lengths: list[int] = []

    def count(_module: Any, _inputs: Any, options: dict[str, Any]) -> None:
        lengths.append(options["input_ids"].shape[1])

    server.service.loaded.kept.forget()  # with echo, nothing of a prompt is reused
    body = {"prompt": PROMPTS, "max_tokens": 5, "temperature": 0, "logprobs": 2}
    plain = raw(server, COMPLETIONS, **body)
    hook = server.service.loaded.model.register_forward_pre_hook(count, with_kwargs=True)
    echoed = raw(server, COMPLETIONS, **body, echo=True)
    hook.remove()
    prompts = sorted(len(ids(prompt)) for prompt in PROMPTS)
    assert sorted(length for length in lengths if length > 1) == [n for n in prompts if n > 1]
    for prompt, one, other in zip(PROMPTS, echoed["choices"], plain["choices"], strict=True):
        assert one["text"] == prompt + other["text"]
        for name in ("token_logprobs", "top_logprobs"):  # in all bits
            assert one["logprobs"][name][len(ids(prompt)) :] == other["logprobs"][name]


def test_large_answers__are_written_off_the_event_loop(server, monkeypatch):
    writers: list[threading.Thread] = []

    def record(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def write(value: Any) -> Any:
            writers.append(threading.current_thread())
            return function(value)

        return write

    monkeypatch.setattr(routes, "write_json", record(routes.write_json))
    monkeypatch.setattr(event_stream, "format_event", record(event_stream.format_event))
    body = {"prompt": "a b c d " * 30, "max_tokens": 0, "echo": True, "logprobs": 20}
    whole = server.post(COMPLETIONS, json=body).json()["choices"][0]
    lines = server.post(COMPLETIONS, json=body | {"stream": True}).text.split("\n\n")
    assert len(writers) >= 2
    assert server.thread not in writers[:2]
    chunk = json.loads(lines[0].removeprefix("data: "))["choices"][0]
    assert len(chunk["logprobs"]["tokens"]) > 64
    assert chunk["logprobs"] == whole["logprobs"]


def test_chat_logprobs__name_each_token_and_its_bytes(server: RunningServer) -> None:
    body = {"messages": HELLO, "max_tokens": 5, "temperature": 0, "logprobs": True}
    answer = raw(server, CHAT, **body, top_logprobs=2)
    (choice,) = answer["choices"]
    content = choice["logprobs"]["content"]
    assert len(content) == answer["usage"]["completion_tokens"]
    assert b"".join(bytes(one["bytes"]) for one in content).decode() == choice["message"]["content"]
    for entry in content:
        assert entry["top_logprobs"][0]["logprob"] == entry["logprob"]  # greedy
        assert len(entry["top_logprobs"]) == 2
    chunks = events(server, CHAT, **body, top_logprobs=2)
    streamed = [chunk["choices"][0]["logprobs"] or {} for chunk in chunks]
    assert [entry for part in streamed for entry in part.get("content", [])] == content


def test_tokenize__and_back(server: RunningServer) -> None:
    encoding = raw(server, "/tokenize", prompt=PROMPTS[0])
    assert encoding == {"count": 5, "max_model_len": 2048, "tokens": ids(PROMPTS[0])}
    assert raw(server, "/detokenize", tokens=encoding["tokens"]) == {"prompt": PROMPTS[0]}
